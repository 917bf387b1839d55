"""What a product takes of x beside x itself, in one kernel: x times its norm's weight, the same in float8, and A x of
each row's adapter. Reference: kernels/rms_norm.py, kernels/quantize.py, kernels/lora.py.

An RMSNorm's 1/rms is left to who uses the product, here and in all of `kernels.gpu.skinny`: it is a factor of a whole
row, adapters included, and sums of squares are at hand when the product is. So rows and adapters need nothing of each
other, and programs for both run side by side.

A x comes in two forms. A program for each row gathers its own slot's A, all of it in flight before the kernel ahead has
ended: where rows are few it is the latency that counts. A program for each active slot, on tensor cores, reads that
slot's A once for all rows of a tile and keeps those that are the slot's.

Nothing here looks at adapter numbers on the host: a captured CUDA graph serves any adapters.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.lora_rows import LoraRows
from kernels.quantize import FP8_MAX, GROUP

Rows = Literal["as they are", "weighted", "float8"]
_ROWS: dict[Rows, int] = {"as they are": 0, "weighted": 1, "float8": 2}
_FLOAT8 = tl.constexpr(2)
_MAX = tl.constexpr(FP8_MAX)
_GROUP = tl.constexpr(GROUP)
_PROGRAMS = 132
"""Multiprocessors of an H100 or H200."""


@triton.jit
def _weigh_row(x, gain, values, squares, row, x_stride, K: tl.constexpr, PDL: tl.constexpr):
    """One row times the norm's weight, in its dtype, and its sum of squares."""
    k = tl.arange(0, triton.next_power_of_2(K))
    weight = tl.load(gain + k, mask=k < K, other=0.0)
    if PDL:
        gdc_wait()
    value = tl.load(x + row.to(tl.int64) * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(values + row.to(tl.int64) * K + k, (value * weight).to(values.dtype.element_ty), mask=k < K)
    tl.store(squares + row, tl.sum(value * value, axis=0))


@triton.jit
def _quantize_row(x, gain, values, scale, squares, row, x_stride, K: tl.constexpr, PDL: tl.constexpr):
    """One row in float8, in the pair order of Fp8Weight."""
    blocks: tl.constexpr = triton.next_power_of_2(K // _GROUP)
    half: tl.constexpr = _GROUP // 2
    block = tl.arange(0, blocks)[:, None]
    k = block * _GROUP + tl.arange(0, half)[None, :]
    inside = block < K // _GROUP
    if PDL:
        gdc_wait()
    source = x + row.to(tl.int64) * x_stride + k
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if gain is not None:
        tl.store(squares + row, tl.sum(tl.sum(first * first + second * second, axis=1), axis=0))
        first = first * tl.load(gain + k, mask=inside, other=0.0)
        second = second * tl.load(gain + k + half, mask=inside, other=0.0)
    most = tl.max(tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1), axis=0)
    factor = tl.maximum(most, 1e-30) / _MAX
    pairs = tl.reshape(tl.join(first, second), [blocks, _GROUP]) / factor
    pairs = tl.minimum(tl.maximum(pairs, -_MAX), _MAX)
    place = values + row.to(tl.int64) * K + block * _GROUP + tl.arange(0, _GROUP)[None, :]
    tl.store(place, pairs.to(tl.float8e4nv), mask=inside)
    tl.store(scale + row, factor)


@triton.jit
def _shrink_row(
    x,
    gain,
    hidden,
    a,
    row_adapters,
    ranks,
    row,
    part,
    split,
    count,
    x_stride,
    K: tl.constexpr,
    RANK: tl.constexpr,
    TARGETS: tl.constexpr,
    K_SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, BLOCK_R (target, rank) pairs, one stretch of K, everything at once."""
    slot = tl.load(row_adapters + row)
    rank = tl.load(ranks + slot)
    pairs = part * BLOCK_R + tl.arange(0, BLOCK_R)
    least = part * BLOCK_R % RANK if RANK % BLOCK_R == 0 else 0
    if (slot > 0) & (least < rank):
        wanted = (pairs < TARGETS * RANK) & (pairs % RANK < rank)
        k = split * K_SPLIT + tl.arange(0, BLOCK_K)
        inside = k < min(split * K_SPLIT + K_SPLIT, K)
        place = a + slot.to(tl.int64) * (TARGETS * RANK * K) + pairs[:, None] * K + k[None, :]
        down = tl.load(place, mask=wanted[:, None] & inside[None, :], other=0.0)
        if gain is not None:
            weight = tl.load(gain + k, mask=inside, other=0.0)
        if PDL:
            gdc_wait()
        value = tl.load(x + row.to(tl.int64) * x_stride + k, mask=inside, other=0.0).to(tl.float32)
        if gain is not None:
            value *= weight
        sums = tl.sum(down.to(tl.float32) * value[None, :], axis=1)
        tl.store(hidden + (split * count + row) * (TARGETS * RANK) + pairs, sums, mask=wanted)
    elif PDL:
        gdc_wait()


@triton.jit
def _shrink_slot(
    x,
    gain,
    hidden,
    a,
    row_adapters,
    active,
    ranks,
    index,
    tile,
    part,
    split,
    count,
    x_stride,
    K: tl.constexpr,
    RANK: tl.constexpr,
    TARGETS: tl.constexpr,
    K_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One active slot, BLOCK_M rows, BLOCK_R (target, rank) pairs, one stretch of K."""
    live = index < tl.load(active)
    slot = tl.load(active + 1 + index, mask=live, other=0)
    rank = tl.load(ranks + slot)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    mine = (tl.load(row_adapters + rows, mask=rows < count, other=-1) == slot) & live
    least = part * BLOCK_R % RANK if RANK % BLOCK_R == 0 else 0
    if (least < rank) & (tl.max(mine.to(tl.int32), 0) > 0):
        pairs = part * BLOCK_R + tl.arange(0, BLOCK_R)
        wanted = (pairs < TARGETS * RANK) & (pairs % RANK < rank)
        end = min(split * K_SPLIT + K_SPLIT, K)
        pair_a = a + slot.to(tl.int64) * (TARGETS * RANK * K) + pairs[None, :] * K
        row_x = x + rows.to(tl.int64)[:, None] * x_stride
        acc = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        if PDL:
            gdc_wait()
        for step in tl.range(0, K_SPLIT // BLOCK_K, num_stages=STAGES):
            k = split * K_SPLIT + step * BLOCK_K + tl.arange(0, BLOCK_K)
            down = tl.load(pair_a + k[:, None], mask=wanted[None, :] & (k < end)[:, None], other=0.0)
            value = tl.load(row_x + k[None, :], mask=mine[:, None] & (k < end)[None, :], other=0.0)
            if gain is not None:
                weight = tl.load(gain + k, mask=k < end, other=0.0)
                value = (value.to(tl.float32) * weight[None, :]).to(value.dtype)
            acc = tl.dot(value, down, acc, input_precision=PRECISION)
        place = (split * count + rows)[:, None] * (TARGETS * RANK) + pairs[None, :]
        tl.store(hidden + place, acc, mask=mine[:, None] & wanted[None, :])
    elif PDL:
        gdc_wait()


@triton.jit(do_not_specialize=["count"])
def _prepare_kernel(
    x,
    gain,
    values,
    scale,
    squares,
    hidden,
    a,
    row_adapters,
    active,
    ranks,
    count,
    x_stride,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    TARGETS: tl.constexpr,
    K_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first programs take a row each, if ROWS; the others the adapters, if there are any."""
    # The product behind asks for its weights meanwhile; it reads nothing of this kernel before this one's end. Adapters
    # and their rows lie still during a step: only x has to be waited for. Who has nothing to do waits as well: the
    # kernel behind takes the end of this one for the end of the one ahead.
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if ROWS > 0:
        if program < count:
            if ROWS == _FLOAT8:
                _quantize_row(x, gain, values, scale, squares, program, x_stride, K, PDL)
            else:
                _weigh_row(x, gain, values, squares, program, x_stride, K, PDL)
        program -= count
    if hidden is not None:  # noqa: SIM102 (known when compiled, the other only when run)
        if program >= 0:
            blocks: tl.constexpr = (TARGETS * RANK + BLOCK_R - 1) // BLOCK_R
            part = program % blocks
            split = program // blocks % SPLITS
            turn = program // (blocks * SPLITS)
            if BLOCK_M == 1:
                _shrink_row(
                    x, gain, hidden, a, row_adapters, ranks, turn, part, split, count, x_stride,
                    K, RANK, TARGETS, K_SPLIT, BLOCK_R, BLOCK_K, PDL,
                )  # fmt: skip
            else:
                _shrink_slot(
                    x, gain, hidden, a, row_adapters, active, ranks, turn % SLOTS, turn // SLOTS, part, split, count,
                    x_stride, K, RANK, TARGETS, K_SPLIT, BLOCK_M, BLOCK_R, BLOCK_K, STAGES, PRECISION, PDL,
                )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """How A x is cut up."""

    block_m: int
    """Rows of a program; 1: a program a row, without tensor cores."""
    block_r: int
    """(target, rank) pairs of a program."""
    block_k: int
    """Inputs of a load; with a program a row all of its stretch."""
    splits: int
    """Programs that share K."""
    warps: int
    stages: int


_ROWS_ALONE = ShrinkConfig(1, 1, 16, 1, 4, 1)
"""As many warps as with adapters: a row's sum of squares does not depend on whether some row has one."""
_INVARIANT = ShrinkConfig(64, 16, 128, 4, 4, 3)
"""For any number of rows."""


def shrink_config(rows: int, depth: int, pairs: int) -> ShrinkConfig:
    """The cut for x [rows, depth] and ``pairs`` = targets · max_rank. Few rows have nothing to be parallel in but
    pairs and K; of many rows each program reads its own once for all pairs."""
    if rows <= 16:
        splits = 1 if depth <= 4096 else -(-depth // 4096)
        block_k = triton.next_power_of_2(triton.cdiv(depth, splits))
        return ShrinkConfig(1, 2 if pairs >= 64 else 1, block_k, splits, 4, 1)
    if rows <= 64:
        return ShrinkConfig(triton.next_power_of_2(rows), 16, 128, max(1, min(4, depth // 1024)), 4, 4)
    programs = triton.cdiv(rows, 64) * triton.cdiv(pairs, 64)
    return ShrinkConfig(64, 64, 64, max(1, min(4, _PROGRAMS // programs)), 4, 3)


class Prepared(NamedTuple):
    """x as a product takes it."""

    x: Any
    """[T, K]: x itself, x times the norm's weight, or that in float8."""
    scale: Any = None
    """[T] float32 of float8 rows: max / 448."""
    squares: Any = None
    """[1, T] float32: sums of squares of rows that were multiplied with the norm's weight; the norm's 1/rms, which is
    neither in x nor in hidden, comes from these."""
    hidden: Any = None
    """[splits, T, targets * max_rank] float32, to be summed over splits: A of each row's adapter times (x times the
    norm's weight). Only what expansion reads is written: rows with an adapter, up to its rank."""


def prepare(
    x: Tensor,
    gain: Tensor | None = None,
    *,
    rows: Rows = "as they are",
    lora: LoraRows | None = None,
    config: ShrinkConfig | None = None,
    pdl: bool = False,
) -> Prepared:
    """Rows and adapters for a product, in one launch (none if there is nothing to do).

    Args:
        x: [T, K] any float dtype, rows contiguous.
        gain: [K] float32: an RMSNorm's weight (Qwen3.5: 1 + w).
        rows: "weighted": ``x · gain`` in x's dtype; "float8": that (x without gain) in e4m3 with a scale by row, in the
            order of Fp8Weight, K a multiple of 128.
        lora: adapters to shrink for.
        config: of the shrink.
        pdl: launch before the kernel ahead has finished (programmatic dependent launch).

    Raises:
        ValueError: shapes do not fit.
    """
    count, depth = x.shape
    if x.stride(1) != 1 or (rows == "float8" and depth % GROUP) or (rows == "weighted" and gain is None):
        raise ValueError(f"prepare: contiguous rows (float8: of a multiple of {GROUP}) are needed, got {list(x.shape)}")
    values, scale, squares, hidden = x, None, None, None
    if rows != "as they are":
        values = torch.empty(x.shape, dtype=torch.float8_e4m3fn if rows == "float8" else x.dtype, device=x.device)
        scale = _floats(x, count) if rows == "float8" else None
        squares = None if gain is None else _floats(x, 1, count)
    programs, slots, targets, rank = count if _ROWS[rows] else 0, 1, 0, 1
    use = _ROWS_ALONE
    if lora is not None:
        _, targets, rank, width = lora.a.shape
        if width != depth:
            raise ValueError(f"x must be [T, {width}], got {list(x.shape)}")
        use = config or (_INVARIANT if lora.invariant else shrink_config(count, depth, targets * rank))
        if use.block_m == 1 and use.block_k * use.splits < depth:
            raise ValueError(f"{use.splits} splits of block_k {use.block_k} do not cover {depth} inputs")
        hidden = _floats(x, use.splits, count, targets * rank)
        if use.block_m > 1:
            slots = max(1, min(lora.capacity, count))
        turns = slots * triton.cdiv(count, use.block_m)
        programs += triton.cdiv(targets * rank, use.block_r) * use.splits * turns
    if programs:
        step = 16 if use.block_m == 1 else use.block_k
        _prepare_kernel[(programs,)](
            x,
            gain,
            values,
            scale,
            squares,
            hidden,
            *((None,) * 4 if lora is None else (lora.a, lora.row_adapters, lora.active, lora.ranks)),
            count,
            x.stride(0),
            K=depth,
            ROWS=_ROWS[rows],
            RANK=rank,
            TARGETS=targets,
            K_SPLIT=triton.cdiv(triton.cdiv(depth, use.splits), step) * step,
            SPLITS=use.splits,
            SLOTS=slots,
            BLOCK_M=use.block_m,
            BLOCK_R=use.block_r,
            BLOCK_K=use.block_k,
            STAGES=use.stages,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            PDL=pdl,
            num_warps=use.warps,
            launch_pdl=pdl,
        )
    return Prepared(values, scale, squares, hidden)


def shrink(
    x: Tensor,
    lora: LoraRows,
    gain: Tensor | None = None,
    *,
    config: ShrinkConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """``Prepared.hidden`` alone."""
    hidden: Tensor = prepare(x, gain, lora=lora, config=config, pdl=pdl).hidden
    return hidden


def _floats(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)
