"""Scorers of a completion's text by what it says: rewards and suites share them."""
