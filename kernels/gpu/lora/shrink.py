"""A x of each row's adapter, as programs of `kernels.gpu.linear.preparation`. Reference: kernels/lora.py.

Three forms. A program for each row gathers its own slot's A: of few rows it is the latency that counts. Of more, a
program gathers a few rows that have one slot, wherever in the batch they are, and multiplies them on tensor cores. Both
have all of their A in flight before the kernel ahead has ended, and of x everything at once after it: no loop, and so
little shared memory that they fit beside the product ahead, and the product behind beside them. Of very many rows a
program for each active slot walks along K and keeps of a tile's rows those that are the slot's.

Nothing here looks at adapter numbers on the host: a captured CUDA graph serves any adapters.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,var-annotated"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.gpu.launch.device import DeviceLimits
from kernels.gpu.launch.programmatic import wait

_MOST_GATHERED = 256
"""Every program looks through the slots of all rows: more than these cost more than they save."""


class Shrinking(NamedTuple):
    """Arguments of a shrinking product as kernels take them: input, matrices, output."""

    x: Any
    """[T, K], and the stride of its rows."""
    x_stride: Any
    gain: Any
    """[K] float32 or None."""
    hidden: Any = None
    """[splits, T, targets * rank] float32."""
    a: Any = None
    row_adapters: Any = None
    active: Any = None
    ranks: Any = None
    """Ranks of LoraRows."""


@triton.jit
def shrink_row(
    job,
    row,
    part,
    split,
    count,
    K: tl.constexpr,
    RANK: tl.constexpr,
    TARGETS: tl.constexpr,
    K_SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    HOLD: tl.constexpr,
):
    """Program for one row, BLOCK_R (target, rank) pairs, one stretch of K, everything at once."""
    slot = tl.load(job.row_adapters + row)
    rank = tl.load(job.ranks + slot)
    pairs = part * BLOCK_R + tl.arange(0, BLOCK_R)
    least = part * BLOCK_R % RANK if RANK % BLOCK_R == 0 else 0
    if (slot > 0) & (least < rank):
        wanted = (pairs < TARGETS * RANK) & (pairs % RANK < rank)
        k = split * K_SPLIT + tl.arange(0, BLOCK_K)
        inside = k < min(split * K_SPLIT + K_SPLIT, K)
        place = job.a + slot.to(tl.int64) * (TARGETS * RANK * K) + pairs[:, None] * K + k[None, :]
        down = tl.load(place, mask=wanted[:, None] & inside[None, :], other=0.0)
        if job.gain is not None:
            weight = tl.load(job.gain + k, mask=inside, other=0.0)
        if PDL:
            wait(HOLD)
        value = tl.load(job.x + row.to(tl.int64) * job.x_stride + k, mask=inside, other=0.0).to(tl.float32)
        if job.gain is not None:
            value *= weight
        sums = tl.sum(down.to(tl.float32) * value[None, :], axis=1)
        tl.store(job.hidden + (split * count + row) * (TARGETS * RANK) + pairs, sums, mask=wanted)


@triton.jit
def _rows_of(row_adapters, active, ranks, index, count, SLOTS: tl.constexpr, MOST: tl.constexpr, BLOCK_M: tl.constexpr):
    """Tile number ``index`` of the rows sorted by slot, each slot's first row at the beginning of a tile: the slot and
    its rank, 0 if there is no such tile, and its rows [BLOCK_M], -1 for none."""
    i = tl.arange(0, triton.next_power_of_2(SLOTS))
    slots = tl.load(active + 1 + i, mask=i < SLOTS, other=0)
    slots = tl.where(i < tl.load(active), slots, 0)
    r = tl.arange(0, MOST)
    adapters = tl.load(row_adapters + r, mask=r < count, other=-1)
    rank = tl.load(ranks + slots)
    tiles = (tl.sum((slots[:, None] == adapters[None, :]).to(tl.int32), axis=1) + BLOCK_M - 1) // BLOCK_M
    tiles = tl.where(slots > 0, tiles, 0)
    end = tl.cumsum(tiles, axis=0)
    chosen = (index >= end - tiles) & (index < end)
    slot = tl.sum(tl.where(chosen, slots, 0), axis=0)
    first = (index - tl.sum(tl.where(chosen, end - tiles, 0), axis=0)) * BLOCK_M
    mine = adapters == slot
    turn = tl.cumsum(mine.to(tl.int32), axis=0) - 1
    taken = mine[:, None] & (turn[:, None] == first + tl.arange(0, BLOCK_M)[None, :])
    return slot, tl.sum(tl.where(chosen, rank, 0), axis=0), tl.sum(tl.where(taken, r[:, None] + 1, 0), axis=0) - 1


@triton.jit
def _sum_warps(acc, WARPS: tl.constexpr):
    """[WARPS, R, M] summed over warps in the threads that store it: through shared memory once, tl.sum() thrice."""
    area: tl.constexpr = acc.shape[1] * acc.shape[2]
    flat = tl.permute(tl.reshape(acc, [WARPS, area]), [1, 0])
    for turn in tl.static_range(5):
        if WARPS >> turn > 1:
            one, other = tl.split(tl.reshape(flat, [area, WARPS >> (turn + 1), 2]))
            flat = one + other
    return tl.reshape(flat, [acc.shape[1], acc.shape[2]])


@triton.jit
def shrink_gathered(
    job,
    index,
    part,
    split,
    count,
    K: tl.constexpr,
    RANK: tl.constexpr,
    TARGETS: tl.constexpr,
    K_SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WARPS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    HOLD: tl.constexpr,
):
    """BLOCK_M rows of one slot, BLOCK_R (target, rank) pairs, one stretch of K that the warps share: from memory to the
    registers of the tensor cores, in an order of K that kernels.gpu.linear.skinny_stream explains."""
    slot, rank, rows = _rows_of(job.row_adapters, job.active, job.ranks, index, count, SLOTS, MOST, BLOCK_M)
    least = part * BLOCK_R % RANK if RANK % BLOCK_R == 0 else 0
    if (slot > 0) & (least < rank):
        blocks: tl.constexpr = BLOCK_K // 32
        turns: tl.constexpr = blocks // WARPS
        high: tl.constexpr = BLOCK_R // 8
        wide: tl.constexpr = BLOCK_M // 8
        steps: tl.constexpr = K_SPLIT // BLOCK_K
        even: tl.constexpr = K_SPLIT * SPLITS == K
        # Tiles [groups of 8 pairs or rows · blocks of 32 inputs · 8, 32]: a warp reads a block, 64 bytes of 8 of them.
        i = tl.arange(0, BLOCK_R * blocks)
        pair = part * BLOCK_R + i // (blocks * 8) * 8 + i % 8
        wanted = (pair < TARGETS * RANK) & (pair % RANK < rank)
        j = tl.arange(0, 32)[None, :]
        k = split * K_SPLIT + (i // 8 % blocks * 32)[:, None] + j
        pair_a = job.a + slot.to(tl.int64) * (TARGETS * RANK * K) + pair[:, None] * K + k
        held = ()
        for s in tl.static_range(steps):
            keep = wanted[:, None] & ((k >= 0) if even else (s * BLOCK_K + k < K))
            held = held + (tl.load(pair_a + s * BLOCK_K, mask=keep, other=0.0),)  # noqa: RUF005
        row = tl.broadcast_to(tl.reshape(rows, [wide, 1, 8]), [wide, blocks, 8])
        row = tl.reshape(row, [BLOCK_M * blocks])
        k = split * K_SPLIT + (tl.arange(0, BLOCK_M * blocks) // 8 % blocks * 32)[:, None] + j
        row_x = job.x + row.to(tl.int64)[:, None] * job.x_stride + k
        if PDL:
            wait(HOLD)
        values = ()
        for s in tl.static_range(steps):
            keep = (row >= 0)[:, None] & ((k >= 0) if even else (s * BLOCK_K + k < K))
            values = values + (tl.load(row_x + s * BLOCK_K, mask=keep, other=0.0),)  # noqa: RUF005
        # Two sums: half as long a chain of products, and what makes ptxas ask for all of x before the first of them.
        acc = tl.zeros((WARPS, BLOCK_R, BLOCK_M), tl.float32)
        other = tl.zeros((WARPS, BLOCK_R, BLOCK_M), tl.float32)
        for s in tl.static_range(steps):
            value = values[s]
            if job.gain is not None:
                weight = tl.load(job.gain + s * BLOCK_K + k, mask=s * BLOCK_K + k < K, other=0.0)
                value = (value.to(tl.float32) * weight).to(value.dtype)
            left = tl.reshape(held[s], [high, turns, WARPS, 8, 4, 2, 2, 2])
            left = tl.reshape(tl.permute(left, [2, 0, 3, 1, 5, 6, 4, 7]), [WARPS, BLOCK_R, turns * 32])
            right = tl.reshape(value, [wide, turns, WARPS, 8, 4, 2, 2, 2])
            right = tl.reshape(tl.permute(right, [2, 1, 5, 6, 4, 7, 0, 3]), [WARPS, turns * 32, BLOCK_M])
            if s % 2 == 0:
                acc = tl.dot(left, right, acc, input_precision=PRECISION)
            else:
                other = tl.dot(left, right, other, input_precision=PRECISION)
        total = _sum_warps(acc + other, WARPS)
        pairs = part * BLOCK_R + tl.arange(0, BLOCK_R)
        keep = (pairs < TARGETS * RANK) & (pairs % RANK < rank)
        place = job.hidden + (split * count + rows[None, :]) * (TARGETS * RANK) + pairs[:, None]
        tl.store(place, total, mask=keep[:, None] & (rows >= 0)[None, :])


@triton.jit
def shrink_slot(
    job,
    index,
    tile,
    part,
    split,
    count,
    K: tl.constexpr,
    RANK: tl.constexpr,
    TARGETS: tl.constexpr,
    K_SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    HOLD: tl.constexpr,
):
    """Program for one active slot, BLOCK_M rows, BLOCK_R (target, rank) pairs, one stretch of K."""
    live = index < tl.load(job.active)
    slot = tl.load(job.active + 1 + index, mask=live, other=0)
    rank = tl.load(job.ranks + slot)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = (tl.load(job.row_adapters + rows, mask=rows < count, other=-1) == slot) & live
    least = part * BLOCK_R % RANK if RANK % BLOCK_R == 0 else 0
    if (least < rank) & (tl.max(mine.to(tl.int32), 0) > 0):
        pairs = part * BLOCK_R + tl.arange(0, BLOCK_R)
        wanted = (pairs < TARGETS * RANK) & (pairs % RANK < rank)
        end = min(split * K_SPLIT + K_SPLIT, K)
        pair_a = job.a + slot.to(tl.int64) * (TARGETS * RANK * K) + pairs[None, :] * K
        row_x = job.x + rows.to(tl.int64)[:, None] * job.x_stride
        acc = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        if PDL:
            wait(HOLD)
        for step in tl.range(0, K_SPLIT // BLOCK_K, num_stages=STAGES):
            k = split * K_SPLIT + step * BLOCK_K + tl.arange(0, BLOCK_K)
            down = tl.load(pair_a + k[:, None], mask=wanted[None, :] & (k < end)[:, None], other=0.0)
            value = tl.load(row_x + k[None, :], mask=mine[:, None] & (k < end)[None, :], other=0.0)
            if job.gain is not None:
                weight = tl.load(job.gain + k, mask=k < end, other=0.0)
                value = (value.to(tl.float32) * weight[None, :]).to(value.dtype)
            acc = tl.dot(value, down, acc, input_precision=PRECISION)
        place = (split * count + rows)[:, None] * (TARGETS * RANK) + pairs[None, :]
        tl.store(job.hidden + place, acc, mask=mine[:, None] & wanted[None, :])


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """Tile sizes of the product A x.

    Raises:
        ValueError: sizes that tensor cores do not take.
    """

    block_m: int
    """Rows of a program; 1: a program a row, without tensor cores."""
    block_r: int
    """(target, rank) pairs of a program."""
    block_k: int
    """Inputs of a load; with a program a row all of its stretch."""
    splits: int
    """Programs that share K."""
    warps: int
    stages: int = 1
    """Loads in flight where rows are not gathered; all, where they are."""
    gathered: bool = False
    """True if a program's rows are some of one slot, wherever they are, instead of neighbours."""

    def __post_init__(self) -> None:
        if self.gathered and (self.block_m < 8 or self.block_r < 16 or self.block_k % (32 * self.warps)):
            raise ValueError(f"gathered rows: 8 of them, 16 pairs and 32 inputs a warp at least, got {self}")

    @property
    def step(self) -> int:
        """Number that a program's stretch of K is a multiple of."""
        return 16 if self.block_m == 1 else self.block_k

    def turns(self, rows: int, slots: int) -> int:
        """Programs for the same pairs and inputs, for x of ``rows`` rows that have at most ``slots`` slots."""
        if self.block_m == 1:
            return rows
        if self.gathered:
            return slots + (rows - slots) // self.block_m
        return slots * -(-rows // self.block_m)

    def most(self, rows: int) -> int:
        """Number of rows as which a kernel takes ``rows`` if it gathers them, 0 if not: few numbers, few compiled
        kernels."""
        if not self.gathered:
            return 0
        return next(most for most in (16, 64, _MOST_GATHERED, rows) if most >= rows)


INVARIANT = ShrinkConfig(64, 16, 128, 4, 4, 3)
"""Tile sizes for any number of rows."""


def shrink_config(rows: int, depth: int, pairs: int, device: DeviceLimits) -> ShrinkConfig:
    """The cut for x [rows, depth] and ``pairs`` = targets · max_rank. Few rows have nothing to be parallel in but
    pairs and K; of many rows each program reads its own once for all pairs."""
    if rows <= 8:
        splits = 1 if depth <= 4096 else -(-depth // 4096)
        block_k = triton.next_power_of_2(triton.cdiv(depth, splits))
        return ShrinkConfig(1, 2 if pairs >= 64 else 1, block_k, splits, 4)
    if rows <= _MOST_GATHERED:
        # Five loads of A and of x a thread, or nine: beside a product of 64 rows there are registers for 4 parts of h.
        return ShrinkConfig(8 if rows <= 64 else 16, 16, 256, min(4, triton.cdiv(depth, 1280)), 8, gathered=True)
    programs = triton.cdiv(rows, 64) * triton.cdiv(pairs, 64)
    # Two programs a multiprocessor, of which one waits: expansion reads as many sums as there are parts of K.
    return ShrinkConfig(64, 64, 64, max(1, min(4, 2 * device.multiprocessors // programs)), 4, 3)
