"""y += B h of adapters as kernels of their own, behind a product of many rows. Reference: kernels/lora.py.

What comes behind gate and up reads all of it and writes half as much anyway: there the expansion is part of the
activation and costs no pass over memory of its own.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.elementary import silu
from kernels.gpu.lora.batch import Adapters, shape_of, target_of, walk
from kernels.gpu.lora.rows import LoraRows


@triton.jit
def _added(
    lora,
    adapters,
    rows,
    first,
    end,
    count,
    width,
    LORA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """B h of columns ``first`` … before ``end``: [BLOCK_M, BLOCK_N] float32."""
    columns = first + tl.arange(0, BLOCK_N)
    lowest = target_of(first, LORA)
    highest = target_of(tl.minimum(first + BLOCK_N, end) - 1, LORA)
    number = tl.load(lora.active)
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    acc = walk(
        acc, 0, 0, number, adapters, lora, rows, columns, columns < end, lowest, highest, count, width, LORA, LORA[3]
    )
    return tl.trans(acc)


@triton.jit(do_not_specialize=["count"])
def _expand_kernel(
    given,
    out,
    lora,
    count,
    columns_out,
    given_stride,
    out_stride,
    LORA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of ``out``: with ACTIVATE made of two of ``given``, else of itself where a row has an adapter."""
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(0) * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    adapters = tl.load(lora.row_adapters + rows, mask=rows < count, other=0)
    some = tl.max(adapters, 0) > 0
    if ACTIVATE:
        width = 2 * columns_out
        keep = (rows < count)[:, None] & (columns < columns_out)[None, :]
        source = given + rows.to(tl.int64)[:, None] * given_stride + columns[None, :]
        gate = tl.load(source, mask=keep, other=0.0).to(tl.float32)
        up = tl.load(source + columns_out, mask=keep, other=0.0).to(tl.float32)
        if some:
            gate += _added(lora, adapters, rows, first, columns_out, count, width, LORA, BLOCK_M, BLOCK_N)
            up += _added(lora, adapters, rows, first + columns_out, width, count, width, LORA, BLOCK_M, BLOCK_N)
        place = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
        tl.store(place, (silu(gate, out.dtype.element_ty) * up).to(out.dtype.element_ty), mask=keep)
    elif some:
        added = _added(lora, adapters, rows, first, columns_out, count, columns_out, LORA, BLOCK_M, BLOCK_N)
        place = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
        keep = (adapters > 0)[:, None] & (columns < columns_out)[None, :]
        base = tl.load(place, mask=keep, other=0.0)
        tl.store(place, (base.to(tl.float32) + added).to(base.dtype), mask=keep)


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """Tile sizes of expand_add()."""

    block_m: int
    block_n: int
    warps: int
    slots: int = 1
    """Side by side, at most."""


def expand_config(rows: int) -> ExpandConfig:
    """Tiles of the output that fit the registers. Few rows mix their slots, tiles of many mostly have one."""
    if rows <= 64:
        return ExpandConfig(max(16, triton.next_power_of_2(rows)), 64, 4, 8)
    return ExpandConfig(64, 128, 4)


def _swiglu_config(rows: int) -> ExpandConfig:
    """Two tiles in registers beside the one that is added; of many rows two programs a multiprocessor."""
    if rows <= 64:
        return ExpandConfig(max(16, triton.next_power_of_2(rows)), 64, 8, 4)
    return ExpandConfig(32, 128, 8)


def expand_add(
    h: Tensor, lora: LoraRows, out: Tensor, *, config: ExpandConfig | None = None, pdl: bool = False
) -> None:
    """Adds B h of every row's adapter, in place.

    Args:
        h: what shrink() gave.
        out: [T, N], rows contiguous.
    """
    rows, width = h.shape[1], lora.b.shape[2]
    if out.shape != (rows, width) or out.stride(1) != 1:
        raise ValueError(f"out must be [{rows}, {width}] with contiguous rows, got {list(out.shape)}")
    _expand(h, lora, out, out, config or expand_config(rows), activate=False, pdl=pdl)


def expand_swiglu(
    h: Tensor, lora: LoraRows, gate_up: Tensor, *, config: ExpandConfig | None = None, pdl: bool = False
) -> Tensor:
    """``silu(gate + B h) · (up + B h)``: expand_add() and `kernels.gpu.activations.swiglu` in one pass, rounded once.

    Args:
        h: what shrink() gave.
        gate_up: [T, 2 · d], gate first, rows contiguous.

    Returns:
        [T, d] in gate_up's dtype; of rows without an adapter the same as swiglu().
    """
    rows, width = h.shape[1], lora.b.shape[2]
    if gate_up.shape != (rows, width) or gate_up.stride(1) != 1 or width % 2:
        raise ValueError(f"gate|up must be [{rows}, {width}] with contiguous rows, got {list(gate_up.shape)}")
    out = torch.empty(rows, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    _expand(h, lora, gate_up, out, config or _swiglu_config(rows), activate=True, pdl=pdl)
    return out


def _expand(
    h: Tensor, lora: LoraRows, given: Tensor, out: Tensor, config: ExpandConfig, *, activate: bool, pdl: bool
) -> None:
    rows, columns = out.shape
    if rows == 0:
        return
    adapters = Adapters(h, lora.b, lora.row_adapters, lora.active, lora.ranks)
    _expand_kernel[triton.cdiv(columns, config.block_n), triton.cdiv(rows, config.block_m)](
        given,
        out,
        adapters,
        rows,
        columns,
        given.stride(0),
        out.stride(0),
        LORA=shape_of(adapters, lora, config.slots),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        ACTIVATE=activate,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
