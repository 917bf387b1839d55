"""The tier in a directory."""
