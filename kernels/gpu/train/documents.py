"""Layout of the documents in a packed training batch, as the kernels take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.gpu.segments import TILE, Segments
from kernels.gpu.train.tree import Tree, depth_first


@dataclass(frozen=True, slots=True)
class Documents:
    """Packed documents end to end; nothing comes before any of them but where there is a tree. All tensors are int32
    views of ``buffer``.

    Everything that varies from batch to batch is read on the device, so that a captured CUDA graph serves every batch
    of as many rows that fits its capacity.
    """

    segments: Segments
    """Rows and tiles of the documents; document i has slot i."""
    first_tile: Tensor
    """[S]: number of each document's first tile."""
    positions: Tensor
    """[T]: place of each token in its document, or behind the root that it goes on from."""
    buffer: Tensor
    tree: Tree | None = None
    """Which go on from others; None: none does."""

    @property
    def count(self) -> int:
        """Documents there is room for."""
        return self.segments.max_segments

    @property
    def tiles(self) -> int:
        """Tiles there is room for."""
        return self.segments.max_tiles

    @classmethod
    def build(cls, lengths: Sequence[int], device: torch.device | str, *, room: int = 0) -> Documents:
        """Layout of documents of these lengths, each at least 1, in order and without gaps.

        Args:
            room: documents to make room for, with as many tiles as so many could have in as many rows; 0: these.

        Raises:
            ValueError: no document, an empty one, or too many.
        """
        if min(lengths, default=0) < 1 or (room and len(lengths) > room):
            raise ValueError(
                f"{len(lengths)} documents of lengths {list(lengths)[:8]}: each needs a token, room {room}"
            )
        count = len(lengths)
        sizes = torch.tensor(lengths, dtype=torch.int64)
        tiles = (sizes + TILE - 1) // TILE
        starts = torch.repeat_interleave(torch.cumsum(sizes, 0) - sizes, sizes)
        zeros = [0] * count
        most = int(sizes.sum()) // TILE + room if room else 0
        plain = Segments.build(lengths, zeros, range(count), zeros, "cpu", max_segments=room, max_tiles=most)
        first_tile = torch.zeros(plain.max_segments, dtype=torch.int64)
        first_tile[:count] = torch.cumsum(tiles, 0) - tiles
        parts = [
            plain.begin,
            plain.start,
            plain.slot,
            plain.adapter,
            plain.tile_segment,
            plain.tile_row,
            plain.out_slot,
            plain.links,
            first_tile.int(),
            (torch.arange(len(starts)) - starts).int(),
        ]
        buffer = torch.cat(parts).to(device)
        views = torch.split(buffer, [len(part) for part in parts])
        return cls(Segments(*views[:8]), views[8], views[9], buffer)

    @classmethod
    def branching(
        cls, lengths: Sequence[int], parents: Sequence[int | None], device: torch.device, *, past: int
    ) -> Documents:
        """Layout of documents that go on from others, in depth-first order.

        Args:
            parents: of each document the one that it goes on from; None: it begins.
            past: inputs that a convolution looks back at.

        Raises:
            ValueError: the documents are in another order (`kernels.gpu.train.tree.depth_first`), or as build() says.
        """
        if [*range(len(lengths))] != depth_first(parents):
            raise ValueError("documents that go on from others must be in depth-first order")
        plain = cls.build(lengths, device)
        tree = Tree.build(lengths, parents, device, past=past)
        starts = torch.tensor(tree.starts, dtype=torch.int32)
        plain.segments.start.copy_(starts)
        plain.positions.add_(torch.repeat_interleave(starts, torch.tensor(lengths)).to(device))
        return replace(plain, tree=tree)

    def replace(self, lengths: Sequence[int]) -> None:
        """Puts other documents of as many rows into the same tensors.

        Raises:
            ValueError: they do not fit.
        """
        other = Documents.build(lengths, "cpu", room=self.count)
        if self.tree is not None or other.buffer.shape != self.buffer.shape:
            raise ValueError(f"documents of {sum(lengths)} rows in the place of {self.positions.shape[0]}")
        self.buffer.copy_(other.buffer)
