"""Checks of `temper doctor`, a module a concern: each is a function from a place to a finding."""
