"""Which sequences the next step computes. No torch."""
