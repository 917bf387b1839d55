"""Training sessions as data: what a researcher sends, what the engine executes. No torch, no gRPC."""
