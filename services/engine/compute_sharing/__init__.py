"""Compute gate: the engine's steps and the trainer's pieces share one device."""
