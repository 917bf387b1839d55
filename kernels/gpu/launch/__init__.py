"""How kernels are launched: programmatic dependent launch, compiled variants, device limits."""
