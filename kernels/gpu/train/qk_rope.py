"""Norm and rotation of queries and keys over all rows of a packed batch, and the backward.

References: `kernels.rms_norm.rms_norm`, `kernels.rope.apply_rope`.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention.qk_rope import rotation_of
from kernels.gpu.elementary import inverse_root
from kernels.rope import Rotation


@triton.jit
def _rotation(inverse_frequency, positions, row, real, column, HALF: tl.constexpr, SCALE: tl.constexpr):
    """Columns of each one's partner, and the cosine and the signed sine of each row and column."""
    rotated = column < 2 * HALF
    partner = tl.where(column < HALF, column + HALF, column - HALF)
    frequency = tl.load(inverse_frequency + tl.where(column < HALF, column, column - HALF), mask=rotated, other=0.0)
    position = tl.load(positions + row, mask=real, other=0)
    cosine, sine = rotation_of(position, frequency, column, HALF, SCALE)
    return partner, rotated, cosine, sine


@triton.jit
def _forward_kernel(
    projected,
    weight,
    inverse_frequency,
    positions,
    out,
    rows,
    eps,
    projected_stride,
    OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    column = tl.arange(0, BLOCK)
    inside = real[:, None] & (column < DIM)[None, :]
    partner, rotated, cosine, sine = _rotation(inverse_frequency, positions, row, real, column, HALF, SCALE)
    has_partner = real[:, None] & rotated[None, :]
    wide = row.to(tl.int64)[:, None]
    for head in range(HEADS):
        source = projected + wide * projected_stride + (OFFSET + head * DIM)
        x = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
        y = tl.load(source + partner[None, :], mask=has_partner, other=0.0).to(tl.float32)
        w = tl.load(weight + head * DIM + column, mask=column < DIM, other=0.0)
        partner_weight = tl.load(weight + head * DIM + partner, mask=rotated, other=0.0)
        scale = inverse_root(tl.sum(x * x, axis=1) / DIM + eps)
        x = scale[:, None] * (x * w[None, :] * cosine + y * partner_weight[None, :] * sine)
        target = out + (wide * HEADS + head) * DIM + column[None, :]
        tl.store(target, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    projected,
    weight,
    inverse_frequency,
    positions,
    grad,
    out,
    rows,
    eps,
    projected_stride,
    out_stride,
    OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    column = tl.arange(0, BLOCK)
    inside = real[:, None] & (column < DIM)[None, :]
    partner, rotated, cosine, sine = _rotation(inverse_frequency, positions, row, real, column, HALF, SCALE)
    has_partner = real[:, None] & rotated[None, :]
    wide = row.to(tl.int64)[:, None]
    for head in range(HEADS):
        place = OFFSET + head * DIM + column[None, :]
        x = tl.load(projected + wide * projected_stride + place, mask=inside, other=0.0).to(tl.float32)
        source = grad + (wide * HEADS + head) * DIM
        dy = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
        dy_partner = tl.load(source + partner[None, :], mask=has_partner, other=0.0).to(tl.float32)
        w = tl.load(weight + head * DIM + column, mask=column < DIM, other=0.0)
        inverse = inverse_root(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
        # The rotation backwards: the partner's sine has the other sign.
        scaled = (dy * cosine - dy_partner * sine) * w[None, :]
        unit = x * inverse
        dx = inverse * (scaled - unit * (tl.sum(scaled * unit, axis=1) / DIM)[:, None])
        tl.store(out + wide * out_stride + place, dx.to(out.dtype.element_ty), mask=inside)


def qk_norm_rope(
    projected: Tensor, weight: Tensor, eps: float, rotation: Rotation, positions: Tensor, *, offset: int
) -> Tensor:
    """``rope(rms_norm(x))`` of each head.

    Args:
        projected: [T, width], rows contiguous; heads · head_dim columns from ``offset`` on are x.
        weight: [heads, head_dim] float32, as used (1 + w).
        rotation: of the first dimensions of each head.
        positions: [T] int32.

    Returns:
        [T, heads, head_dim] in projected's dtype.
    """
    heads, dim = weight.shape
    count = projected.shape[0]
    out = torch.empty(count, heads, dim, dtype=projected.dtype, device=projected.device)
    _forward_kernel[(triton.cdiv(count, 4),)](
        projected,
        weight,
        rotation.frequencies,
        positions,
        out,
        count,
        eps,
        projected.stride(0),
        OFFSET=offset,
        HEADS=heads,
        DIM=dim,
        HALF=rotation.half,
        SCALE=rotation.scale,
        ROWS=4,
        BLOCK=max(16, triton.next_power_of_2(dim)),
        num_warps=4,
    )
    return out


def qk_norm_rope_backward(
    projected: Tensor,
    weight: Tensor,
    eps: float,
    rotation: Rotation,
    positions: Tensor,
    grad: Tensor,
    *,
    offset: int,
    out: Tensor,
) -> None:
    """Gradient of qk_norm_rope() in its columns of ``projected``.

    Args:
        grad: [T, heads, head_dim] contiguous.
        out: [T, width], of which the same columns are written; rows contiguous.
    """
    heads, dim = weight.shape
    count = projected.shape[0]
    _backward_kernel[(triton.cdiv(count, 4),)](
        projected,
        weight,
        rotation.frequencies,
        positions,
        grad,
        out,
        count,
        eps,
        projected.stride(0),
        out.stride(0),
        OFFSET=offset,
        HEADS=heads,
        DIM=dim,
        HALF=rotation.half,
        SCALE=rotation.scale,
        ROWS=4,
        BLOCK=max(16, triton.next_power_of_2(dim)),
        num_warps=4,
    )
