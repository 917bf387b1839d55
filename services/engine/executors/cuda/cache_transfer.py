"""Copies between the caches of a CUDA device and host memory, beside the steps that the engine computes.

A payload goes through a staging buffer on the device, which has it as it lies on the host: so the bus sees a few large
copies, and one kernel a buffer full takes the blocks of all layers to their places and sums them up. The buffer has two
halves: a kernel that waits until the steps leave it room does not keep the bus waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.gpu.copies.staging import move_items
from services.engine.executors.cache_payload import Pieces, layout
from services.engine.executors.cuda.compile_ahead import compile_ahead
from services.engine.executors.cuda.pinned_memory import CudaRuntime, PinnedMemory
from services.engine.executors.cuda.stream import Arrival, EngineStream
from services.engine.kv_offload.entry_format import WORD
from services.engine.kv_offload.messages import Bytes, Fence, Layout
from services.engine.models.device_batch import DeviceCache

STAGING_BYTES = 64 * 2**20
"""Size of the staging buffer: a half takes the bus 0.6 ms, the kernel behind it a twentieth of that."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that one kernel moves between a pool and the staging buffer."""

    pool: Tensor
    """[rows, slots, words] int64."""
    staged: int
    """Word of the staging buffer where the first item's rows begin."""
    first_word: int
    """The number of that word in its item."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Run of bytes that goes through a half of the staging buffer at once: consecutive bytes of a payload."""

    size: int
    """Bytes."""
    items: slice
    """Items of the payload, the blocks before the state."""
    item_stride: int
    """Words."""
    parts: Sequence[_Part]


class CudaCacheTransfer:
    """See CacheTransfer. A block is its keys in all layers, then its values, then the scales of both; a state is what
    each of its pools has of all layers. Only ``fence`` is for other threads than the one that uses the rest.

    Args:
        engine: where the steps are queued.
        identity: of the model and how it computes (see Layout.fingerprint).
        staging_bytes: memory of the device for the staging buffer.
        host_memory: where host memory is borrowed from; None: it has its own.

    Raises:
        ValueError: blocks or states are no whole number of words, or a block or one layer's state does not fit into
            half of the staging buffer.
    """

    def __init__(
        self,
        cache: DeviceCache,
        engine: EngineStream,
        identity: str,
        *,
        staging_bytes: int = STAGING_BYTES,
        host_memory: PinnedMemory | None = None,
    ) -> None:
        self._engine = engine
        # Behind the engine's in priority.
        self._copies, self._kernels = (EngineStream(engine.device, priority=0) for _ in range(2))
        stacked = [pool for pool in (cache.stacked.pages, cache.stacked.scales) if pool is not None]
        facts = [(str(pool.dtype), pool.shape[1:2] + pool.shape[3:]) for pool in stacked]
        facts += [(str(pool.dtype), pool.shape[:1] + pool.shape[2:]) for pool in cache.state_pools()]
        blocks = cache.stacked.pools()
        states = [pool.flatten(2).view(torch.uint8) for pool in cache.state_pools()]
        if any(pool.shape[2] % WORD for pool in states):
            raise ValueError(f"a layer's state of {[pool.shape[2] for pool in states]} bytes: multiples of {WORD}")
        self._layout = layout(
            identity,
            ["triton", *((dtype, tuple(shape)) for dtype, shape in facts)],
            block_size=cache.block_size,
            parts=[pool.shape[2] for pool in blocks for _ in range(len(pool))],
            slot=sum(len(pool) * pool.shape[2] for pool in states),
        )
        padding = self._layout.slot_bytes - sum(len(pool) * pool.shape[2] for pool in states)
        if padding:
            states.append(torch.zeros(1, cache.num_slots, padding, dtype=torch.uint8, device=engine.device))
        half = staging_bytes // 2 // WORD
        self._halves = torch.empty(2, half, dtype=torch.int64, device=engine.device)
        self._block_parts = _block_parts([pool.view(torch.int64) for pool in blocks])
        largest = max(self._layout.block_bytes, *(pool.shape[2] for pool in states))
        if largest > half * WORD:
            raise ValueError(f"half of a staging buffer of {staging_bytes} bytes does not hold {largest} at once")
        self._state_runs = _state_runs([pool.view(torch.int64) for pool in states], half)
        own = PinnedMemory(None if engine.stream is None else CudaRuntime(engine.device))
        self._host_memory = host_memory or own
        self._borrowed: list[Bytes] | None = None if host_memory is None else []
        """Pieces of somebody else's host memory."""

    @property
    def layout(self) -> Layout:
        return self._layout

    def fence(self) -> Fence:
        return self._engine.mark()

    def host_memory(self, size: int) -> Bytes:
        """See CacheTransfer. It is pinned until close(), or until nothing refers to it.

        Raises:
            MemoryError: the machine gives or pins no more.
        """
        piece = self._host_memory.allocate(size)
        if self._borrowed is not None:
            self._borrowed.append(piece)
        return piece

    def close(self) -> None:
        """See CacheTransfer. Host memory that is still in use is no longer pinned, unless it is somebody else's."""
        if self._borrowed is None:
            self._host_memory.close()
            return
        for piece in self._borrowed:
            self._host_memory.keep(piece)
        self._borrowed.clear()

    def warm_up(self, compilers: Executor | None = None) -> None:
        """Compiles the kernels, on scratch memory.

        Args:
            compilers: a CompilerPool; None: a pool for this call, if anything is not compiled yet.
        """
        memory = np.zeros(self._layout.block_bytes + self._layout.slot_bytes, dtype=np.uint8)

        def launch() -> None:
            self._save([0, 0], [memory], self.fence())
            self._load([memory], [0, 0], self.fence())

        if self._engine.stream is not None:
            compile_ahead(launch, compilers)
        launch()

    def save(self, blocks: Sequence[int], slot: int, target: Sequence[Bytes], after: Fence) -> Sequence[int]:
        return self._save([*blocks, slot] if slot else blocks, target, after, state=slot > 0)

    def load(self, source: Sequence[Bytes], blocks: Sequence[int], slot: int, after: Fence) -> Sequence[int]:
        return self._load(source, [*blocks, slot] if slot else blocks, after, state=slot > 0)

    @torch.inference_mode()
    def _save(
        self, items: Sequence[int], target: Sequence[Bytes], after: Arrival, *, state: bool = True
    ) -> Sequence[int]:
        """Args: items: the blocks, then the state's slot if there is one."""
        runs = list(self._runs(len(items) - state, state))
        pieces = Pieces(target, sum(run.size for run in runs))
        with self._moving(items, after) as (index, sums):
            freed = [Arrival(None)] * 2
            for turn, run in enumerate(runs):
                half = self._halves[turn % 2]
                freed[turn % 2].hold(self._kernels)
                with self._kernels.active():
                    _move(run, half, index, sums, to_pool=False)
                self._kernels.mark().hold(self._copies)
                with self._copies.active():
                    for piece, staged in _beside(pieces, half, run.size):
                        piece.copy_(staged, non_blocking=True)
                freed[turn % 2] = self._copies.mark()
        return self._read(sums)

    @torch.inference_mode()
    def _load(
        self, source: Sequence[Bytes], items: Sequence[int], after: Arrival, *, state: bool = True
    ) -> Sequence[int]:
        runs = list(self._runs(len(items) - state, state))
        pieces = Pieces(source, sum(run.size for run in runs))
        with self._moving(items, after) as (index, sums):
            freed = [Arrival(None)] * 2
            for turn, run in enumerate(runs):
                half = self._halves[turn % 2]
                freed[turn % 2].hold(self._copies)
                with self._copies.active():
                    for piece, staged in _beside(pieces, half, run.size):
                        staged.copy_(piece, non_blocking=True)
                self._copies.mark().hold(self._kernels)
                with self._kernels.active():
                    _move(run, half, index, sums, to_pool=True)
                freed[turn % 2] = self._kernels.mark()
        return self._read(sums)

    def _runs(self, blocks: int, state: bool) -> Iterator[_Run]:
        size = self._layout.block_bytes
        most = self._halves.shape[1] * WORD // size
        for first in range(0, blocks, most):
            count = min(most, blocks - first)
            yield _Run(count * size, slice(first, first + count), size // WORD, self._block_parts)
        if state:
            for run, parts in self._state_runs:
                yield _Run(run, slice(blocks, blocks + 1), 0, parts)

    @contextmanager
    def _moving(self, items: Sequence[int], after: Arrival) -> Iterator[tuple[Tensor, Tensor]]:
        """The items and their sums on the device. At the end, whatever happens, nothing is on its way any more."""
        for stream in (self._copies, self._kernels):
            after.hold(stream)
        try:
            with self._kernels.active():
                index = torch.tensor(items, dtype=torch.int32).to(self._engine.device, non_blocking=True)
                sums = torch.zeros(len(items), dtype=torch.int64, device=self._engine.device)
            yield index, sums
        finally:
            self._copies.mark().hold(self._kernels)
            self._kernels.mark().wait()

    def _read(self, sums: Tensor) -> Sequence[int]:
        with self._kernels.active():
            found: list[int] = sums.tolist()
        return found


def _block_parts(pools: Sequence[Tensor]) -> Sequence[_Part]:
    parts: list[_Part] = []
    at = 0
    for pool in pools:
        parts.append(_Part(pool, at, at))
        at += len(pool) * pool.shape[2]
    return parts


def _state_runs(pools: Sequence[Tensor], room: int) -> Sequence[tuple[int, Sequence[_Part]]]:
    """Bytes and parts of the runs of a state: layer by layer, as many as fit into ``room`` words."""
    runs: list[tuple[int, Sequence[_Part]]] = []
    parts: list[_Part] = []
    used = at = 0
    for pool in pools:
        row, words = 0, pool.shape[2]
        while row < len(pool):
            count = min(len(pool) - row, (room - used) // words)
            if count:
                parts.append(_Part(pool[row : row + count], used, at))
                row, used, at = row + count, used + count * words, at + count * words
            else:
                runs.append((used * WORD, parts))
                parts, used = [], 0
    return [*runs, (used * WORD, parts)]


def _move(run: _Run, half: Tensor, items: Tensor, sums: Tensor, *, to_pool: bool) -> None:
    for part in run.parts:
        move_items(
            part.pool,
            half[part.staged :],
            items[run.items],
            sums[run.items],
            item_stride=run.item_stride,
            first_word=part.first_word,
            to_pool=to_pool,
        )


def _beside(pieces: Pieces, half: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The next pieces of host memory, each with its place in the staging buffer."""
    staged = half.view(torch.uint8)
    at = 0
    for piece in pieces.take(size):
        yield torch.from_numpy(piece), staged[at : at + len(piece)]
        at += len(piece)
