"""Counter-based noise: what a request draws depends on its seed, the index of the output token and the token id alone.

So the same seed gives the same tokens whatever else is in the batch, after preemption, and over any subset of the
vocabulary (candidates of top-k need noise only for themselves). Over the whole vocabulary a block of tokens is drawn
first and then one of its tokens: some thousand draws instead of a quarter of a million.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def _signed(value: int) -> int:
    """A 32-bit pattern as the int32 that torch can hold."""
    return value - (1 << 32) if value >= 1 << 31 else value


# 32-bit finaliser of low bias: https://github.com/skeeto/hash-prospector/issues/19 (TheIronborn).
_MUL_1 = _signed(0x21F0AAAD)
_MUL_2 = _signed(0x735A2D97)
_STRIDE = _signed(0x9E3779B1)
BLOCK = 1024
"""Tokens of a block, the last one's may be fewer. The tokens of a seed depend on it."""
FIRST_BLOCK = _signed(1 << 31)
"""Block b has the noise of token FIRST_BLOCK + b, which no vocabulary has."""
_MAX_UNIFORM = 1.0 - 2.0**-24
"""Largest float32 below 1, so that log1p(-u) stays finite."""


def row_keys(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    """Two 32-bit keys for each row's seed and counter: [R] and [R] to [R, 2] (splitmix64, Steele et al. 2014)."""

    def mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    gamma = np.uint64(0x9E3779B97F4A7C15)
    # The seed is mixed before the counter is added: otherwise seed s + gamma would be seed s one token later.
    mixed = mix(mix(seeds + gamma) + (counters + np.uint64(1)) * gamma)
    return np.ascontiguousarray(mixed).view(np.int32).reshape(-1, 2)


def exponential(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Draws of Exp(1), one a row and token.

    Args:
        keys: [R, 2] int32 from `row_keys`.
        token_ids: [V] or [R, V] int32.

    Returns:
        [R, V] float32, positive and finite. Small values keep full relative precision down to 2**-32, which is what
        an exponential race needs: the smallest draw wins.
    """
    x = token_ids * _STRIDE + keys[:, :1]
    _xor_shift(x, 16, 0xFFFF)
    x *= _MUL_1
    x ^= keys[:, 1:]
    _xor_shift(x, 15, 0x1FFFF)
    x *= _MUL_2
    _xor_shift(x, 15, 0x1FFFF)
    x &= 0x7FFFFFFF
    uniform = x.to(torch.float32).mul_(2.0**-31).add_(2.0**-32).clamp_(max=_MAX_UNIFORM)
    return uniform.neg_().log1p_().neg_()


def _xor_shift(x: Tensor, bits: int, mask: int) -> None:
    """x ^= x >>> bits in place; the mask makes torch's arithmetic shift logical."""
    shifted = x >> bits
    shifted &= mask
    x ^= shifted
