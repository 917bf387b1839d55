"""Sampling on the device: masks, penalties, filters, noise, log-probabilities."""
