"""Weights: checkpoint files, formats, quantization, upload."""
