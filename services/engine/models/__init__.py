"""Models: configuration, weights, forward passes, LoRA."""
