"""Paged attention for decode and prefill, and for Hopper."""
