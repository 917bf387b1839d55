"""Importance of units: scores by weights, activations, gradients, by leaving units out, or at random."""
