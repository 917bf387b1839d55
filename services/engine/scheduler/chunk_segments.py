"""Segments of prefill chunks, split at their snapshots. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from services.engine.scheduler.step_plan import Chunk


def segments(chunk: Chunk) -> Sequence[Chunk]:
    """Segments of a chunk: up to its first snapshot, from there to the next one, and so on to its end. Each is a chunk
    without snapshots that continues from the state behind the one before. Its slot is the chunk's; its out_slot is
    where the state behind it goes."""
    if not chunk.snapshots:
        return (chunk,)
    known, begin = chunk.token_ids, chunk.start
    ends = [*chunk.snapshots, (begin + len(known), chunk.out_slot or chunk.slot)]
    parts: list[Chunk] = []
    for end, slot in ends:
        part = known[begin - chunk.start : end - chunk.start]
        parts.append(chunk._replace(token_ids=part, start=begin, out_slot=slot, snapshots=()))
        begin = end
    between = (part._replace(samples=False, next_id=after.token_ids[0]) for part, after in pairwise(parts))
    return [*between, parts[-1]]


def split_at_snapshots(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """Segments of all chunks."""
    if not any(chunk.snapshots for chunk in chunks):
        return chunks
    return [link for chunk in chunks for link in segments(chunk)]
