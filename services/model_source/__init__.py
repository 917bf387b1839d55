"""Fetches a checkpoint into a directory before the engine starts."""
