"""Bodies of /v1/messages."""
