"""Scheduler: decides which sequences the next step computes. No torch."""
