"""Training: steps, each method as a job, training beside traffic, what the methods teach."""
