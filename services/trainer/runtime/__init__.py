"""The trainer thread: claims, attempts, checkpoints, publishing."""
