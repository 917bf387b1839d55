"""Pieces of memory that follow each other, in other portions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.engine.kv_offload.messages import Bytes


def spans(pieces: Sequence[Bytes], most: int) -> Iterator[tuple[int, list[memoryview]]]:
    """(offset, memory) of portions of at most ``most`` bytes, each of memory from one piece or several."""
    offset = length = 0
    portion: list[memoryview] = []
    for piece in pieces:
        view = piece.data
        while view:
            part = view[: most - length]
            portion.append(part)
            length += len(part)
            view = view[len(part) :]
            if length == most:
                yield offset, portion
                offset, length, portion = offset + length, 0, []
    if portion:
        yield offset, portion
