"""Adapters of an engine: slots, pins, downloads, and the flip of an alias."""
