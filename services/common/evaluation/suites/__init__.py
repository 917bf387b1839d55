"""Suites: items with the scorer of their answers, immutable versions of them in the object store."""
