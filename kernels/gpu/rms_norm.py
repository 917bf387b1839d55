"""Fused residual addition and RMS normalisation. Reference: `kernels.rms_norm.rms_norm`."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.elementary import inverse_root

_ELEMENTS_A_WARP = 512
"""16 a thread: two 16-byte loads of bf16 in flight before the sum."""
_MAX_WARPS = 16


@triton.jit
def _rms_norm_kernel(
    x,
    delta,
    weight,
    out,
    columns,
    eps,
    x_stride,
    delta_stride,
    out_stride,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    if PDL:
        gdc_launch_dependents()
    w = tl.load(weight + column, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if HAS_DELTA:
        addend = tl.load(delta + row * delta_stride + column, mask=inside, other=0.0)
        # Rounded to x's dtype before the norm, so that the norm sees the residual that the next layer sees.
        value = (value.to(tl.float32) + addend.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + row * x_stride + column, value, mask=inside)
    y = value.to(tl.float32)
    inverse = inverse_root(tl.sum(y * y, axis=0) / columns + eps)
    tl.store(out + row * out_stride + column, (y * inverse * w).to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    delta: Tensor | None = None,
    *,
    out: Tensor | None = None,
    num_warps: int | None = None,
    pdl: bool = False,
) -> Tensor:
    """``x += delta``; ``x / sqrt(mean(x²) + eps) · weight`` over the last dimension, one pass over memory.

    The sum of squares is in float32 (Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467).

    Args:
        x: [T, d] bfloat16, float16 or float32, last dimension contiguous. Changed in place if ``delta`` is given.
        weight: [d] float32, as used: Qwen3.5's norms pass 1 + w.
        delta: [T, d], the output of the block before, added to the residual stream x first; the sum is rounded to x's
            dtype.
        out: [T, d], where to write the result.
        num_warps: of a program (one row); chosen by d if None.
        pdl: launch before the kernel ahead has finished (programmatic dependent launch).

    Returns:
        [T, d] in x's dtype.

    Raises:
        ValueError: shapes do not fit.
    """
    rows, columns = x.shape
    if weight.shape != (columns,) or (delta is not None and delta.shape != x.shape):
        raise ValueError(f"rms_norm: x {tuple(x.shape)}, weight {tuple(weight.shape)}, delta must have the shape of x")
    if x.stride(1) != 1 or (delta is not None and delta.stride(1) != 1):
        raise ValueError("rms_norm: rows must be contiguous")
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    block = triton.next_power_of_2(columns)
    warps = num_warps or max(1, min(_MAX_WARPS, block // _ELEMENTS_A_WARP))
    _rms_norm_kernel[(rows,)](
        x,
        x if delta is None else delta,
        weight,
        out,
        columns,
        eps,
        x.stride(0),
        x.stride(0) if delta is None else delta.stride(0),
        out.stride(0),
        HAS_DELTA=delta is not None,
        BLOCK=block,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out
