"""Layout of a prefill's sequences in the flat batch, as device buffers of fixed capacity.

Everything that varies from step to step is read on the device, so that a captured CUDA graph serves every batch that
fits its capacity. Padding computes nothing: a padding segment has no rows, a padding tile ends at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

TILE = 64
"""Most rows of a tile. A tile never spans two segments."""


@dataclass(frozen=True, slots=True)
class Segments:
    """S segments of consecutive rows and their tiles; all int32 on one device.

    A sequence whose state is also wanted somewhere in the middle is a chain of segments, its links, one behind the
    other: each goes on where the one before ends and leaves the state there. The first link has at least as many rows
    as a convolution looks back, so that no other one needs what the slot holds of its past.

    Raises:
        ValueError: the shapes contradict each other.
    """

    begin: Tensor
    """[S + 1]: first row of each segment, then the end of the last; equal neighbours are padding."""
    start: Tensor
    """[S]: tokens of the sequence already in the cache. 0: its state slot holds garbage, to be read as zeros."""
    slot: Tensor
    """[S]: state slot, which is also the row of the block table."""
    adapter: Tensor
    """[S]: LoRA slot, 0 for none."""
    tile_segment: Tensor
    """[C]: segment of each tile, -1 for padding."""
    tile_row: Tensor
    """[C]: first row of each tile in the flat batch. A tile ends TILE rows later or with its segment."""
    out_slot: Tensor
    """[S]: state slot to write to: ``slot``, or another one if the state of ``slot`` must stay as it is. Of a chain's
    links only the last may have ``slot``."""
    links: Tensor
    """[S]: links of the chain that begins with this segment, 1 for a segment on its own; 0 for a chain's other links
    and for padding."""
    chains: int = field(default=0, kw_only=True)
    """Chains that there can be, segments on their own included, to choose how to cut the work; 0: max_segments."""

    def __post_init__(self) -> None:
        count = self.start.shape[0]
        shapes = [tuple(x.shape) for x in (self.begin, self.slot, self.adapter, self.out_slot, self.links)]
        if shapes != [(count + 1,), *[(count,)] * 4] or self.tile_segment.shape != self.tile_row.shape:
            raise ValueError(f"{count} segments with begin, slot, adapter, out_slot, links of shapes {shapes}")
        integers = (self.begin, self.start, self.slot, self.out_slot, self.links, self.tile_segment, self.tile_row)
        if any(x.dtype != torch.int32 for x in integers):
            raise ValueError("segments are int32")

    @property
    def max_segments(self) -> int:
        return self.start.shape[0]

    @property
    def max_tiles(self) -> int:
        return self.tile_segment.shape[0]

    @property
    def max_chains(self) -> int:
        return self.chains or self.max_segments

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        starts: Sequence[int],
        slots: Sequence[int],
        adapters: Sequence[int],
        device: torch.device | str,
        *,
        first_row: int = 0,
        max_segments: int = 0,
        max_tiles: int = 0,
        out_slots: Sequence[int] | None = None,
        links: Sequence[int] | None = None,
    ) -> Segments:
        """Layout of segments of these lengths, in order and without gaps, from row ``first_row`` on.

        Args:
            max_segments, max_tiles: capacity to pad to; 0: none.
            out_slots: where states are written; None: to ``slots``.
            links: see Segments.links; None: each segment is on its own.
        """
        begin = [first_row]
        tile_segment: list[int] = []
        tile_row: list[int] = []
        for index, length in enumerate(lengths):
            for offset in range(0, length, TILE):
                tile_segment.append(index)
                tile_row.append(begin[-1] + offset)
            begin.append(begin[-1] + length)
        spare = max(0, max_segments - len(lengths))
        tiles = max(0, max_tiles - len(tile_row))

        def buffer(values: Sequence[int], padding: int, count: int) -> Tensor:
            return torch.tensor([*values, *[padding] * count], dtype=torch.int32).to(device)

        return cls(
            begin=buffer(begin, begin[-1], spare),
            start=buffer(starts, 0, spare),
            slot=buffer(slots, 0, spare),
            adapter=buffer(adapters, 0, spare),
            tile_segment=buffer(tile_segment, -1, tiles),
            tile_row=buffer(tile_row, begin[-1], tiles),
            out_slot=buffer(slots if out_slots is None else out_slots, 0, spare),
            links=buffer([1] * len(lengths) if links is None else links, 0, spare),
        )
