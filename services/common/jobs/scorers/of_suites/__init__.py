"""Scorers of suites only: they read more than the text of a completion."""
