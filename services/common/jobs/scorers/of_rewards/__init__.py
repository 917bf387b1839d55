"""Scorers that only rewards of training jobs have."""
