"""Copies between the caches of an engine that computes with torch and host memory; on a GPU it is
services/engine/executors/cuda/cache_transfer.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.engine.executors.cache_payload import Pieces, layout
from services.engine.kv_offload.entry_format import WORD, checksum, weights
from services.engine.kv_offload.messages import Bytes, Fence, Layout
from services.engine.models.batch import CacheBuffers


class CpuCacheTransfer:
    """See CacheTransfer. A block is its keys in all layers, then its values; a state its convolution's past in all
    layers, then its recurrent ones.

    Args:
        identity: of the model and how it computes (see Layout.fingerprint).

    Raises:
        ValueError: the caches are not on the CPU, or their blocks are no whole number of words.
    """

    def __init__(self, cache: CacheBuffers, identity: str) -> None:
        # As they lie in memory: the convolution's channels last.
        states = (*(pool.transpose(1, 2) for pool in cache.conv_states), *cache.recurrent_states)
        pools = (*cache.keys, *cache.values)
        if any(pool.device.type != "cpu" for pool in (*pools, *states)):
            raise ValueError("the caches are not on the CPU")
        self._blocks = [_rows(pool) for pool in pools]
        self._states = [_rows(pool) for pool in states]
        parts, slot = [pool.shape[1] for pool in self._blocks], sum(pool.shape[1] for pool in self._states)
        shapes = [(str(pool.dtype), tuple(pool.shape[1:])) for pool in (*pools, *states)]
        self._layout = layout(identity, ["torch", *shapes], block_size=cache.block_size, parts=parts, slot=slot)
        self._weights = weights(max(self._layout.block_bytes, self._layout.slot_bytes) // WORD)

    @property
    def layout(self) -> Layout:
        return self._layout

    def warm_up(self) -> None:
        """There is nothing to compile."""

    def close(self) -> None:
        """Nothing to give back: host memory here is the interpreter's."""

    def fence(self) -> Fence:
        """A CPU's steps are done when they have been launched."""
        return None

    def host_memory(self, size: int) -> Bytes:
        return np.zeros(size, dtype=np.uint8)

    @torch.inference_mode()
    def save(self, blocks: Sequence[int], slot: int, target: Sequence[Bytes], after: Fence) -> Sequence[int]:  # noqa: ARG002
        pieces = Pieces(target, self._size(blocks, slot))
        sums: list[int] = []
        for pools, index, size in self._items(blocks, slot):
            item = np.zeros(size, dtype=np.uint8)
            at = 0
            for pool in pools:
                item[at : at + pool.shape[1]] = pool[index].numpy()
                at += pool.shape[1]
            sums.append(checksum(item, self._weights))
            at = 0
            for piece in pieces.take(size):
                piece[:] = item[at : at + len(piece)]
                at += len(piece)
        return sums

    @torch.inference_mode()
    def load(self, source: Sequence[Bytes], blocks: Sequence[int], slot: int, after: Fence) -> Sequence[int]:  # noqa: ARG002
        pieces = Pieces(source, self._size(blocks, slot))
        sums: list[int] = []
        for pools, index, size in self._items(blocks, slot):
            item = np.concatenate(list(pieces.take(size)))
            sums.append(checksum(item, self._weights))
            at = 0
            for pool in pools:
                pool[index].copy_(torch.from_numpy(item[at : at + pool.shape[1]]))
                at += pool.shape[1]
        return sums

    def _items(self, blocks: Sequence[int], slot: int) -> list[tuple[list[Tensor], int, int]]:
        """Blocks and a state in a payload's order: where their bytes lie, their number there and their size."""
        items = [(self._blocks, block, self._layout.block_bytes) for block in blocks]
        return [*items, (self._states, slot, self._layout.slot_bytes)] if slot else items

    def _size(self, blocks: Sequence[int], slot: int) -> int:
        return len(blocks) * self._layout.block_bytes + (self._layout.slot_bytes if slot else 0)


def _rows(pool: Tensor) -> Tensor:
    """[items, bytes of one] of a contiguous pool."""
    return pool.view(len(pool), -1).view(torch.uint8)
