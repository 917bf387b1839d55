"""The gated activation of the MLP. Reference: `kernels.activations.swiglu`."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.elementary import silu

_BLOCK = 1024
"""Columns of one program: 8 a thread with 4 warps, one 16-byte load of bf16 from each half."""


@triton.jit
def _swiglu_kernel(gate_up, out, width, gate_up_stride, out_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = gate_up + row * gate_up_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    result = silu(gate, out.dtype.element_ty) * up
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), mask=inside)


def swiglu(
    gate_up: Tensor, *, out: Tensor | None = None, block: int = _BLOCK, num_warps: int = 4, pdl: bool = False
) -> Tensor:
    """``silu(gate) · up`` (Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202), computed in float32.

    Args:
        gate_up: [T, 2 · d] any float dtype, gate first, last dimension contiguous.
        out: [T, d], where to write the result.
        block: columns of one program, a power of two.
        num_warps: of a program.
        pdl: launch before the kernel ahead has finished (programmatic dependent launch).

    Returns:
        [T, d] in the same dtype. The reference rounds silu(gate) to it as well; here only the result is rounded.

    Raises:
        ValueError: an odd number of columns, or columns that are not contiguous.
    """
    rows, columns = gate_up.shape
    if columns % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"swiglu: expected contiguous rows of gate|up, got {tuple(gate_up.shape)}")
    width = columns // 2
    if out is None:
        out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(block, triton.next_power_of_2(width))
        _swiglu_kernel[(rows, triton.cdiv(width, block))](
            gate_up,
            out,
            width,
            gate_up.stride(0),
            out.stride(0),
            BLOCK=block,
            PDL=pdl,
            num_warps=num_warps,
            launch_pdl=pdl,
        )
    return out
