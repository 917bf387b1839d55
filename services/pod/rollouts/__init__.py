"""Rollouts of training jobs from the pod's own engine."""
