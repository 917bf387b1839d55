"""Searches for the fastest variant of a kernel or of a decode step."""
