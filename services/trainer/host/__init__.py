"""Interface of the engine beside the trainer: compute, rollouts, adapters."""
