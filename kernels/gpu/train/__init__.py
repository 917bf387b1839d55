"""Training kernels beside those of serving: forwards that keep what their backward reads, and the backwards."""
