"""Tuning of the attention kernels, of serving and of training."""
