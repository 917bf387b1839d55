"""Memory of training: estimate of a job, budget, reservations."""
