"""Launch of kernels: programmatic dependent launch, compiled variants, device limits."""
