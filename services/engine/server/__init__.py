"""The engine's gRPC services."""
