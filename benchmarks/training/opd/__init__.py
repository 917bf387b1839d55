"""Benchmark of on-policy distillation, with and without TRL."""
