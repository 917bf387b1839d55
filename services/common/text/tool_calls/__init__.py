"""Tool calls in a stream of text."""
