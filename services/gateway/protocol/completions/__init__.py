"""Bodies of /v1/completions."""
