"""Bodies of /v1/responses and /v1/conversations."""
