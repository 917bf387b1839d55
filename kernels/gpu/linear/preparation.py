"""Inputs of a product that are made of x, in one kernel: x times its norm's weight, the same in float8, and A x of
each row's adapter. Reference: kernels/rms_norm.py, kernels/quantize.py, kernels/lora.py.

An RMSNorm's 1/rms is left to who uses the product, here and in all of `kernels.gpu.linear.skinny`: it is a factor of a
whole row, adapters included, and sums of squares are at hand when the product is. So rows and adapters need nothing of
each other, and programs for both run side by side.

The forms of A x are in kernels.gpu.lora.shrink.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.launch.device import DeviceLimits, limits_of
from kernels.gpu.launch.programmatic import wait
from kernels.gpu.lora.rows import LoraRows
from kernels.gpu.lora.shrink import (
    INVARIANT,
    ShrinkConfig,
    Shrinking,
    shrink_config,
    shrink_gathered,
    shrink_row,
    shrink_slot,
)
from kernels.quantize import FP8_MAX, GROUP

Rows = Literal["as they are", "weighted", "float8"]
_ROWS: dict[Rows, int] = {"as they are": 0, "weighted": 1, "float8": 2}
_FLOAT8 = tl.constexpr(2)
_MAX = tl.constexpr(FP8_MAX)
_GROUP = tl.constexpr(GROUP)
_ROWS_ALONE = ShrinkConfig(1, 1, 16, 1, 4)
"""Launch of rows without adapters. As many warps as with them, whatever their cut says: a row's sum of squares does not
depend on whether some row has one."""


_HELD = 10240
"""Numbers of a row that those warps hold without spilling; a longer one, which has neither norm nor adapter, gets four
times as many."""


@triton.jit
def _weigh_row(x, gain, values, squares, row, x_stride, K: tl.constexpr, PDL: tl.constexpr, HOLD: tl.constexpr):
    """Row times the norm's weight, in its dtype, and its sum of squares."""
    k = tl.arange(0, triton.next_power_of_2(K))
    weight = tl.load(gain + k, mask=k < K, other=0.0)
    if PDL:
        wait(HOLD)
    value = tl.load(x + row.to(tl.int64) * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(values + row.to(tl.int64) * K + k, (value * weight).to(values.dtype.element_ty), mask=k < K)
    tl.store(squares + row, tl.sum(value * value, axis=0))


@triton.jit
def _quantize_row(
    x, gain, values, scale, squares, row, x_stride, K: tl.constexpr, PDL: tl.constexpr, HOLD: tl.constexpr
):
    """Row in float8, in the pair order of Fp8Weight."""
    blocks: tl.constexpr = triton.next_power_of_2(K // _GROUP)
    half: tl.constexpr = _GROUP // 2
    block = tl.arange(0, blocks)[:, None]
    k = block * _GROUP + tl.arange(0, half)[None, :]
    inside = block < K // _GROUP
    if PDL:
        wait(HOLD)
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


@triton.jit(do_not_specialize=["count"])
def _prepare_kernel(
    job,
    values,
    scale,
    squares,
    count,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    TARGETS: tl.constexpr,
    K_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    HOLD: tl.constexpr,
):
    """The first programs take a row each, if ROWS; the others the adapters, if there are any. MOST: of gathered rows
    the most there are, 0 if they are not gathered."""
    # The product behind asks for its weights meanwhile; it reads nothing of this kernel before this one's end. Adapters
    # and their rows lie still during a step: only x has to be waited for.
    if PDL:  # noqa: SIM102
        if not HOLD:
            gdc_launch_dependents()
    program = tl.program_id(0)
    if ROWS > 0:
        if program < count:
            if ROWS == _FLOAT8:
                _quantize_row(job.x, job.gain, values, scale, squares, program, job.x_stride, K, PDL, HOLD)
            else:
                _weigh_row(job.x, job.gain, values, squares, program, job.x_stride, K, PDL, HOLD)
        program -= count
    if job.hidden is not None:  # noqa: SIM102 (known when compiled, the other only when run)
        if program >= 0:
            blocks: tl.constexpr = (TARGETS * RANK + BLOCK_R - 1) // BLOCK_R
            part = program % blocks
            split = program // blocks % SPLITS
            turn = program // (blocks * SPLITS)
            if MOST > 0:
                shrink_gathered(
                    job, turn, part, split, count, K, RANK, TARGETS, K_SPLIT, BLOCK_R, BLOCK_K,
                    SPLITS, SLOTS, MOST, BLOCK_M, WARPS, PRECISION, PDL, HOLD,
                )  # fmt: skip
            elif BLOCK_M == 1:
                shrink_row(job, turn, part, split, count, K, RANK, TARGETS, K_SPLIT, BLOCK_R, BLOCK_K, PDL, HOLD)
            else:
                shrink_slot(
                    job, turn % SLOTS, turn // SLOTS, part, split, count, K, RANK, TARGETS, K_SPLIT, BLOCK_R, BLOCK_K,
                    BLOCK_M, STAGES, PRECISION, PDL, HOLD,
                )  # fmt: skip
    # Who had nothing to do has made room at once; but the kernel behind takes the end of this one for the end of the
    # one ahead, so one waits in any case.
    if PDL:  # noqa: SIM102
        if program == 0:
            gdc_wait()


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
    device: DeviceLimits | None = None,
    pdl: bool = False,
    hold: bool = False,
) -> Prepared:
    """Rows and adapters for a product, in one launch (none if there is nothing to do).

    Args:
        x: [T, K] any float dtype, rows contiguous.
        gain: [K] float32: an RMSNorm's weight (Qwen3.5: 1 + w).
        rows: "weighted": ``x · gain`` in x's dtype; "float8": that (x without gain) in e4m3 with a scale by row, in the
            order of Fp8Weight, K a multiple of 128.
        lora: adapters to shrink for.
        config: of the shrink; shrink_config() if None.
        device: limits to cut the work up for where no configuration is given; those of the tensors' device if None.
        pdl: launch before the kernel ahead has finished (programmatic dependent launch).
        hold: let the kernel behind start only after the one ahead has finished.

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
    use, job = _ROWS_ALONE, Shrinking(x, x.stride(0), gain)
    if lora is not None:
        _, targets, rank, width = lora.a.shape
        if width != depth:
            raise ValueError(f"x must be [T, {width}], got {list(x.shape)}")
        use = config or (
            INVARIANT if lora.invariant else shrink_config(count, depth, targets * rank, device or limits_of(x.device))
        )
        if use.block_m == 1 and use.block_k * use.splits < depth:
            raise ValueError(f"{use.splits} splits of block_k {use.block_k} do not cover {depth} inputs")
        hidden = _floats(x, use.splits, count, targets * rank)
        job = Shrinking(x, x.stride(0), gain, hidden, lora.a, lora.row_adapters, lora.active, lora.ranks)
        slots = max(1, min(lora.capacity, count)) if use.block_m > 1 else 1
        programs += triton.cdiv(targets * rank, use.block_r) * use.splits * use.turns(count, slots)
    if programs:
        warps = use.warps if rows == "as they are" else _ROWS_ALONE.warps
        if gain is None and lora is None and depth > _HELD:
            warps *= 4
        _prepare_kernel[(programs,)](
            job,
            values,
            scale,
            squares,
            count,
            K=depth,
            ROWS=_ROWS[rows],
            RANK=rank,
            TARGETS=targets,
            K_SPLIT=triton.cdiv(triton.cdiv(depth, use.splits), use.step) * use.step,
            SPLITS=use.splits,
            SLOTS=slots,
            MOST=use.most(count),
            BLOCK_M=use.block_m,
            BLOCK_R=use.block_r,
            BLOCK_K=use.block_k,
            STAGES=use.stages,
            WARPS=warps,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            PDL=pdl,
            HOLD=hold,
            num_warps=warps,
            launch_pdl=pdl,
            **({"maxnreg": 255} if use.gathered else {}),
        )
    return Prepared(values, scale, squares, hidden)


def shrink(
    x: Tensor,
    lora: LoraRows,
    gain: Tensor | None = None,
    *,
    config: ShrinkConfig | None = None,
    device: DeviceLimits | None = None,
    pdl: bool = False,
) -> Tensor:
    """``Prepared.hidden`` alone."""
    hidden: Tensor = prepare(x, gain, lora=lora, config=config, device=device, pdl=pdl).hidden
    return hidden


def _floats(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)
