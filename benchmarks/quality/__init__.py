"""What quantization costs, and how far sampler and trainer are apart."""
