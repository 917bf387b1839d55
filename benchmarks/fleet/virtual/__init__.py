"""Simulated engines in virtual time: the clock, their connections, their adapters, and themselves."""
