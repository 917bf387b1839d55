"""Trajectories: what a policy did and what it saw, as a form of training data."""
