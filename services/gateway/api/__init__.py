"""The HTTP API: one package or module a surface."""
