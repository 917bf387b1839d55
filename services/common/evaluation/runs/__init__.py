"""Runs of suites: what was asked, every answer with its score, and the result with intervals and comparisons."""
