"""Chunks cut at their snapshots. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from services.engine.plan import Chunk


class Link(NamedTuple):
    """A part of a chunk: up to a snapshot, or to the chunk's end."""

    start: int
    """Position of its first token."""
    length: int
    """Tokens, at least 1."""
    out_slot: int
    """Where the state behind its last token goes."""


def links(chunk: Chunk) -> Sequence[Link]:
    """The parts of a chunk in their order: each but the first goes on from the state behind the one before."""
    last = chunk.out_slot or chunk.slot
    if not chunk.snapshots:
        return (Link(chunk.start, len(chunk.token_ids), last),)
    ends = (*chunk.snapshots, (chunk.start + len(chunk.token_ids), last))
    starts = (chunk.start, *(position for position, _ in chunk.snapshots))
    return [Link(start, end - start, slot) for start, (end, slot) in zip(starts, ends, strict=True)]
