"""Searches over the captured decode step."""
