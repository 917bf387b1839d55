"""Bodies of /v1/chat/completions."""
