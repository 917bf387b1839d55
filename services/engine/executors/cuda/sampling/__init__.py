"""Sampling on the device: parameters in tables, masks, results."""
