"""Environments in training: what agents learn in ours, and what becomes of a job when theirs fail."""
