"""Training of a pod: the trainer thread beside the engine, and the gRPC service of its sessions."""
