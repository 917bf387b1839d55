"""Checkpoints made for measurements: shapes of the family, matrices in float8, a tokenizer as wide as the model."""
