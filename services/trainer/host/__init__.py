"""What the trainer asks of the engine beside it: compute, rollouts, adapters."""
