"""Where the documents of a packed training batch lie, as the kernels want it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.segments import TILE, Segments


@dataclass(frozen=True, slots=True)
class Documents:
    """Packed documents end to end; nothing comes before any of them. All tensors int32 on one device."""

    segments: Segments
    """Their rows and tiles, without padding; document i has slot i."""
    first_tile: Tensor
    """[S]: number of each document's first tile."""
    positions: Tensor
    """[T]: place of each token in its document."""
    longest: int
    """Tokens of the longest document."""

    @property
    def count(self) -> int:
        return self.segments.max_segments

    @property
    def tiles(self) -> int:
        return self.segments.max_tiles

    @classmethod
    def build(cls, lengths: Sequence[int], device: torch.device | str) -> Documents:
        """For documents of these lengths, each at least 1, in order and without gaps.

        Raises:
            ValueError: no document, or an empty one.
        """
        if min(lengths, default=0) < 1:
            raise ValueError(f"documents of lengths {list(lengths)[:8]}: each needs a token")
        sizes = torch.tensor(lengths, dtype=torch.int64)
        tiles = (sizes + TILE - 1) // TILE
        starts = torch.repeat_interleave(torch.cumsum(sizes, 0) - sizes, sizes)
        zeros = [0] * len(lengths)
        return cls(
            segments=Segments.build(lengths, zeros, range(len(lengths)), zeros, device),
            first_tile=(torch.cumsum(tiles, 0) - tiles).to(device, torch.int32),
            positions=(torch.arange(len(starts)) - starts).to(device, torch.int32),
            longest=max(lengths),
        )
