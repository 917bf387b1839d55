"""Quality benchmarks: what quantization costs, and how far sampler and trainer are apart."""
