"""Measurements: speed, memory, quality and what training teaches. README.md has the commands and the figures."""
