"""Scorers of completions: one module a scorer with its settings, and their registry."""
