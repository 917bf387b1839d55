"""Benchmarks of the forge's speed, and of what it makes."""
