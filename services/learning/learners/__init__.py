"""Learners: policies by which adapters get better from the traffic, cycle after cycle."""
