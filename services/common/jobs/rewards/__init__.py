"""Specifications of rewards."""
