"""Layout of cache payloads, shared by both implementations of CacheTransfer: how they are cut, padded and named. No
torch here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from services.engine.kv_offload.entry_format import WORD
from services.engine.kv_offload.messages import Bytes, Layout

FORMAT = 1
"""Version of the payload format: it changes whenever the bytes come to mean something else."""
_SLOT_UNIT = 16
"""Bytes: a state is a whole number of them, with zeros at its end."""


def layout(identity: str, facts: Sequence[object], *, block_size: int, parts: Sequence[int], slot: int) -> Layout:
    """The layout of payloads.

    Args:
        identity: of the model and how it computes: equal where caches hold the same numbers for the same tokens.
        facts: all else that the bytes depend on; what they are written as counts.
        block_size: tokens.
        parts: bytes of a block's parts, each in one piece on the device.
        slot: bytes of a state's.

    Raises:
        ValueError: a part of a block is no whole number of a checksum's words.
    """
    if any(size % WORD for size in parts):
        raise ValueError(f"parts of a block of {list(parts)} bytes: each must be a multiple of {WORD}")
    digest = hashlib.blake2b(digest_size=20, person=b"temper layout")
    for fact in (FORMAT, identity, block_size, *facts):
        written = repr(fact).encode()
        digest.update(len(written).to_bytes(8, "little"))
        digest.update(written)
    return Layout(digest.hexdigest(), block_size, sum(parts), padded(slot))


def padded(slot: int) -> int:
    """Bytes of a state in a payload."""
    return -(-slot // _SLOT_UNIT) * _SLOT_UNIT


class Pieces:
    """Walks through pieces of memory that follow each other.

    Raises:
        ValueError: together they do not have ``size`` bytes.
    """

    def __init__(self, pieces: Sequence[Bytes], size: int) -> None:
        found = sum(len(piece) for piece in pieces)
        if found != size:
            raise ValueError(f"pieces of {found} bytes for a payload of {size}")
        self._pieces = iter(pieces)
        self._rest: Bytes | None = None

    def take(self, size: int) -> Iterator[Bytes]:
        """The next ``size`` bytes, as they lie in memory."""
        while size:
            rest = next(self._pieces) if self._rest is None else self._rest
            part, left = rest[:size], rest[size:]
            self._rest = left if len(left) else None
            size -= len(part)
            if len(part):
                yield part
