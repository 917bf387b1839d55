"""The checksum of blocks and states: Σ wᵢ xᵢ mod 2⁶⁴ over 64-bit words, with odd weights.

A multilinear hash (Lemire & Kaser, Strongly universal string hashing is fast, arXiv 1202.4961): any change of one word
shows, and a swap, a shift or another page in its place goes unnoticed with a probability of 2⁻⁶³ or so. It is made for
devices: one multiplication and one sum a word, in any order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.engine.kv_offload.messages import Bytes

WORD = 8
"""Bytes; what is summed is a whole number of them."""
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def weights(words: int) -> npt.NDArray[np.int64]:
    """[words], of the words in their order: SplitMix64 (Steele, Lea & Flood 2014) from 1 on, made odd."""
    z = (np.arange(1, words + 1, dtype=np.uint64)) * np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


def checksum(data: Bytes, weight: npt.NDArray[np.int64]) -> int:
    """Of [WORD · n] contiguous bytes under the first n weights: between -2⁶³ and 2⁶³ - 1."""
    words = data.view(np.int64)
    return int((words * weight[: len(words)]).sum(dtype=np.int64))
