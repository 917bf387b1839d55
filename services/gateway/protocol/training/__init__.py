"""Bodies of /v1/forge and /v1/fine_tuning."""
