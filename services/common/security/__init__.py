"""API key files, TLS, and addresses that may be called."""
