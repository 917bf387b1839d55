"""Running batches of requests: what a gateway does besides answering."""
