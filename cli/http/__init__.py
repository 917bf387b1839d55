"""The client side of the HTTP API: requests, server-sent events, errors as exit codes."""
