"""Token masks: bits over the vocabulary, in llguidance's layout."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.int32]
"""Mask, [words] int32: bit ``t % 32`` of word ``t // 32`` tells whether token ``t`` is allowed."""


def allow(row: Bits, tokens: Iterable[int]) -> None:
    """Sets the bits of some tokens."""
    unsigned = row.view(np.uint32)
    for token in tokens:
        unsigned[token >> 5] |= np.uint32(1 << (token & 31))


def forbid(row: Bits, tokens: Iterable[int]) -> None:
    """Clears the bits of some tokens."""
    unsigned = row.view(np.uint32)
    for token in tokens:
        unsigned[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)


def allows(row: Bits, token: int) -> bool:
    """True if a token's bit is set."""
    return bool((int(row[token >> 5]) >> (token & 31)) & 1)


def tokens_of(row: Bits) -> list[int]:
    """All tokens whose bit is set, ascending."""
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return found
