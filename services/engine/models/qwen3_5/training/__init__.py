"""The differentiable forward over packed documents: gradients for the adapter only, the base weights are frozen.

`plain` is torch's autograd over the reference kernels (the CPU), `trunk` the same arithmetic on Triton kernels with a
backward of its own (CUDA): `layer` has one decoder layer in both directions, `adapters` the low-rank additions.
"""
