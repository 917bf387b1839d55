"""Batches of requests, which a gateway runs besides answering clients."""
