"""The gated norm of DeltaNet over packed prefill segments. Reference: `kernels.rms_norm.gated_rms_norm`."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.elementary import inverse_root, silu
from kernels.gpu.segments import TILE, Segments


@triton.jit
def _gated_norm_kernel(
    x,
    gate,
    weight,
    out,
    begins,
    tile_segment,
    tile_row,
    eps,
    x_stride,
    gate_stride,
    out_stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(1)
    tile = part // (TILE_ROWS // ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + column, mask=column < DIM, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    segment = tl.load(tile_segment + tile)
    if segment < 0:
        return
    end = tl.load(begins + segment + 1)
    first = tl.load(tile_row + tile) + part % (TILE_ROWS // ROWS) * ROWS
    if first >= end:
        return
    row = first + tl.arange(0, ROWS)[:, None]
    inside = (row < end) & (column < DIM)
    place = tl.program_id(0) * DIM + column
    row = row.to(tl.int64)
    o = tl.load(x + row * x_stride + place, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    inverse = inverse_root(tl.sum(o * o, axis=1) / DIM + eps)
    y = o * inverse[:, None] * w * silu(z, out.dtype.element_ty)
    tl.store(out + row * out_stride + place, y.to(out.dtype.element_ty), mask=inside)


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    segments: Segments,
    *,
    out: Tensor,
    rows: int = 16,
    num_warps: int = 4,
    pdl: bool = False,
) -> Tensor:
    """``rms_norm(x) · silu(gate)`` of each head, norm before gate, computed in float32.

    Args:
        x: [T, heads · d], output of the recurrence.
        gate: [T, heads · d] (a view with a row stride is fine).
        weight: [d] float32, plain (not 1 + w).
        segments: the rows to compute.
        out: [T, heads · d], where to write; rows outside the segments stay as they are. May be ``x``.
        rows, num_warps: rows (a power of two up to TILE) and warps of a program.
        pdl: launch before the kernel ahead has finished (programmatic dependent launch).

    Returns:
        ``out``.

    Raises:
        ValueError: shapes do not fit.
    """
    (dim,) = weight.shape
    if x.shape != gate.shape or out.shape != x.shape or x.shape[1] % dim:
        raise ValueError(f"gated_norm: {tuple(x.shape)}, gate {tuple(gate.shape)}, out {tuple(out.shape)}, d {dim}")
    if segments.max_tiles:
        _gated_norm_kernel[(x.shape[1] // dim, segments.max_tiles * (TILE // rows))](
            x,
            gate,
            weight,
            out,
            segments.begin,
            segments.tile_segment,
            segments.tile_row,
            eps,
            x.stride(0),
            gate.stride(0),
            out.stride(0),
            DIM=dim,
            BLOCK=triton.next_power_of_2(dim),
            ROWS=rows,
            TILE_ROWS=TILE,
            PDL=pdl,
            num_warps=num_warps,
            launch_pdl=pdl,
        )
    return out
