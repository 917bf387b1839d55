"""Products with the LoRA matrices of each row's adapter slot."""
