"""Environments that a job's rollouts act in, as a job names them."""
