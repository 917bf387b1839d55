"""Contamination: which items of a suite a version's training data hold, told by hashes without the data."""
