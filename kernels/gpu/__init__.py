"""Triton kernels, each the twin of a plain-torch reference in the module of the same name above."""
