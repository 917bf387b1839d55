"""Bodies of /v1/adapters."""
