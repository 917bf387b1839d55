"""Backward of the RMS norm. Reference: autograd through `kernels.rms_norm.rms_norm`."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementary import inverse_root

_ELEMENTS_A_WARP = 512
"""16 a thread, as in the forward: three rows of bf16 in flight before the sums."""
_MAX_WARPS = 16


@triton.jit
def _backward_kernel(
    x,
    weight,
    grad,
    onto,
    normed,
    out,
    columns,
    eps,
    x_stride,
    grad_stride,
    onto_stride,
    ONTO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    w = tl.load(weight + column, mask=inside, other=0.0)
    y = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    inverse = inverse_root(tl.sum(y * y, axis=0) / columns + eps)
    unit = y * inverse
    tl.store(normed + row * columns + column, (unit * w).to(normed.dtype.element_ty), mask=inside)
    scaled = dy * w
    dx = inverse * (scaled - unit * (tl.sum(scaled * unit, axis=0) / columns))
    if ONTO:
        dx += tl.load(onto + row * onto_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, dx.to(out.dtype.element_ty), mask=inside)


def rms_norm_backward(
    x: Tensor, weight: Tensor, eps: float, grad: Tensor, onto: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradient of ``y = x / sqrt(mean(x²) + eps) · weight`` in x, added to that of the residual stream.

    With u = x / rms: ``dx = (w dy − u mean(w dy · u)) / rms`` (Zhang and Sennrich, arXiv 1910.07467, appendix).

    Args:
        x: [T, d], the forward's input.
        weight: [d] float32, as the forward used it; it is frozen.
        grad: [T, d], dy.
        onto: [T, d], the gradient that reaches x past the norm, if any does.

    Returns:
        ``dx + onto`` and y itself (what the layer behind the norm read, computed in passing), both [T, d] in x's dtype.

    Raises:
        ValueError: shapes do not fit.
    """
    rows, columns = x.shape
    past = x if onto is None else onto
    if weight.shape != (columns,) or grad.shape != x.shape or past.shape != x.shape:
        raise ValueError(
            f"rms_norm_backward: x {tuple(x.shape)}, weight {tuple(weight.shape)}, gradients {tuple(grad.shape)} and "
            f"{tuple(past.shape)}"
        )
    if any(tensor.stride(1) != 1 for tensor in (x, grad, past)):
        raise ValueError("rms_norm_backward: rows must be contiguous")
    out, normed = torch.empty(2, rows, columns, dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(columns)
        _backward_kernel[(rows,)](
            x,
            weight,
            grad,
            past,
            normed,
            out,
            columns,
            eps,
            x.stride(0),
            grad.stride(0),
            past.stride(0),
            ONTO=onto is not None,
            BLOCK=block,
            num_warps=max(1, min(_MAX_WARPS, block // _ELEMENTS_A_WARP)),
        )
    return out, normed
