"""Attempts to get out of the sandbox, and the field that they are made in."""
