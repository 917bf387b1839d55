"""Canaries: a version of an adapter answers a share of the traffic, until a test says whether it is better."""
