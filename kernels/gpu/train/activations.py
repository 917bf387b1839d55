"""Backward of the gated activation. Reference: autograd through `kernels.activations.swiglu`."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementary import sigmoid_for

_BLOCK = 1024


@triton.jit
def _swiglu_backward_kernel(
    gate_up, grad, out, active, width, gate_up_stride, grad_stride, out_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = gate_up + row * gate_up_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = sigmoid_for(gate, out.dtype.element_ty)
    silu = gate * weight
    target = out + row * out_stride + column
    # silu'(g) = σ(g) (1 + g (1 − σ(g))) = σ(g) + silu(g) (1 − σ(g))
    tl.store(target, (dy * up * (weight + silu * (1.0 - weight))).to(out.dtype.element_ty), mask=inside)
    tl.store(target + width, (dy * silu).to(out.dtype.element_ty), mask=inside)
    tl.store(active + row * width + column, (silu * up).to(active.dtype.element_ty), mask=inside)


def swiglu_backward(gate_up: Tensor, grad: Tensor, *, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """Gradient of ``silu(gate) · up``, computed in float32.

    Args:
        gate_up: [T, 2 · d], the forward's input, gate first; rows contiguous.
        grad: [T, d].
        in_place: the gradient goes where ``gate_up`` is, and the activation where ``grad`` is.

    Returns:
        The gradient [T, 2 · d] and the activation itself [T, d] (what the next product read), in gate_up's dtype.

    Raises:
        ValueError: shapes do not fit.
    """
    rows, columns = gate_up.shape
    width = columns // 2
    if grad.shape != (rows, width) or columns % 2 or gate_up.stride(1) != 1 or grad.stride(1) != 1:
        raise ValueError(f"swiglu_backward: gate|up {tuple(gate_up.shape)}, gradient {tuple(grad.shape)}")
    if in_place and not grad.is_contiguous():
        raise ValueError("swiglu_backward: a gradient that is written over must be contiguous")
    if in_place:
        out, active = gate_up, grad
    else:
        out = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device)
        active = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(width))
        _swiglu_backward_kernel[(rows, triton.cdiv(width, block))](
            gate_up,
            grad,
            out,
            active,
            width,
            gate_up.stride(0),
            grad.stride(0),
            out.stride(0),
            BLOCK=block,
            num_warps=4,
        )
    return out, active
