"""The gated norm of DeltaNet over all rows, and its backward. Reference: autograd through
`kernels.rms_norm.gated_rms_norm`."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementary import inverse_root, sigmoid_for


@triton.jit
def _backward_kernel(
    x,
    gate,
    weight,
    grad,
    dx,
    dgate,
    result,
    rows,
    eps,
    gate_stride,
    grad_stride,
    dgate_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < DIM)
    place = tl.program_id(0) * DIM + column
    row = row.to(tl.int64)
    w = tl.load(weight + column, mask=column < DIM, other=0.0)
    o = tl.load(x + row * (HEADS * DIM) + place, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(grad + row * grad_stride + place, mask=inside, other=0.0).to(tl.float32)
    inverse = inverse_root(tl.sum(o * o, axis=1) / DIM + eps)[:, None]
    unit = o * inverse
    open_ = sigmoid_for(z, dx.dtype.element_ty)
    silu = z * open_
    normed = unit * w
    tl.store(result + row * (HEADS * DIM) + place, (normed * silu).to(result.dtype.element_ty), mask=inside)
    dz = dy * normed * (open_ + silu * (1.0 - open_))
    tl.store(dgate + row * dgate_stride + place, dz.to(dgate.dtype.element_ty), mask=inside)
    scaled = dy * silu * w
    do = inverse * (scaled - unit * (tl.sum(scaled * unit, axis=1) / DIM)[:, None])
    tl.store(dx + row * (HEADS * DIM) + place, do.to(dx.dtype.element_ty), mask=inside)


def gated_norm_backward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    grad: Tensor,
    *,
    dgate: Tensor,
    in_place: bool = False,
    rows: int = 16,
) -> tuple[Tensor, Tensor]:
    """Gradient of ``rms_norm(x) · silu(gate)`` of each head, computed in float32.

    Args:
        x: [T, heads · d] contiguous, the forward's input.
        gate: [T, heads · d] (a view with a row stride is fine).
        weight: [d] float32, frozen.
        grad: [T, heads · d].
        dgate: [T, heads · d], where the gate's gradient goes (a view with a row stride is fine).
        in_place: the gradient goes where ``grad`` is, and the result where ``x`` is.
        rows: of a program, a power of two.

    Returns:
        The gradient in x and the forward's result (what the next product read), both [T, heads · d].

    Raises:
        ValueError: shapes do not fit.
    """
    (dim,) = weight.shape
    count, width = x.shape
    if any(tensor.shape != x.shape for tensor in (gate, grad, dgate)) or width % dim or not x.is_contiguous():
        raise ValueError(f"gated_norm_backward: {tuple(x.shape)}, gate {tuple(gate.shape)}, d {dim}")
    if in_place and not grad.is_contiguous():
        raise ValueError("gated_norm_backward: a gradient that is written over must be contiguous")
    dx, result = (grad, x) if in_place else torch.empty(2, count, width, dtype=x.dtype, device=x.device)
    if count:
        _backward_kernel[(width // dim, triton.cdiv(count, rows))](
            x,
            gate,
            weight,
            grad,
            dx,
            dgate,
            result,
            count,
            eps,
            gate.stride(0),
            grad.stride(0),
            dgate.stride(0),
            HEADS=width // dim,
            DIM=dim,
            BLOCK=triton.next_power_of_2(dim),
            ROWS=rows,
            num_warps=4,
        )
    return dx, result
