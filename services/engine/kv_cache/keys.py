"""Histories as bytes: a token is a little-endian uint32, so that comparing and hashing prompts are calls into C."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from services.engine.kv_offload.messages import TOKEN_BYTES

_CODE = "I" if array("I").itemsize == TOKEN_BYTES else "L"


def encode(token_ids: Iterable[int]) -> bytes:
    """TOKEN_BYTES a token."""
    tokens = array(_CODE, token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def decode(tokens: bytes) -> list[int]:
    """The inverse of encode()."""
    ids = array(_CODE, tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def shared(label: bytes, tokens: bytes, at: int) -> int:
    """How many tokens of ``label`` stand in ``tokens`` from token ``at`` on as well."""
    offset = at * TOKEN_BYTES
    most = min(len(label), len(tokens) - offset)
    # Whole labels are compared where they lie; slices would be copies of them.
    if tokens.startswith(label, offset) if most == len(label) else label.startswith(tokens[offset:]):
        return most // TOKEN_BYTES
    # Halving: each comparison ends at the first difference, so all of them together read the label about twice.
    low, high = 0, most // TOKEN_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        begin, end = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if label[begin:end] == tokens[offset + begin : offset + end]:
            low = middle
        else:
            high = middle
    return low
