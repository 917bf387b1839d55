"""All gRPC to engines: discovery, routing, streams, circuit breaker."""
