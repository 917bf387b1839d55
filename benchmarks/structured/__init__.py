"""Structured output: generated schemas, and decoding with and without masks."""
