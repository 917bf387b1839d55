"""Metrics and traces of the engine."""
