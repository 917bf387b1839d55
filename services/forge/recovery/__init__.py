"""Recovery: what a smaller checkpoint lost is learnt again, from examples or from the model that it was cut out of."""
