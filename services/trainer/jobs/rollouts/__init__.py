"""Runs of jobs that sample for themselves, round after round."""
