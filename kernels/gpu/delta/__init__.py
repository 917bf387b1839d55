"""The gated delta rule and its causal convolution: steps, chunks, verification of draft tokens."""
