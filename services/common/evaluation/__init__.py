"""Evaluation: suites of items, and statistics of their scores. No torch."""
