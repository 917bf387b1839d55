"""The engine's cases through gateway and gRPC, and the cost of tracing."""
