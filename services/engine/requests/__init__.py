"""Requests and their updates: plain data."""
