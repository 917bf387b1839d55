"""Matrix products with few and many rows, with bf16, fp8 and int4 weights."""
