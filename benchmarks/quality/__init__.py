"""Quality benchmarks: what quantization and the forge cost, and how far sampler and trainer are apart."""
