"""Readers of published evaluation sets: files that users bring become items and settings of a suite."""
