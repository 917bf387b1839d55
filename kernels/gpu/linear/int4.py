"""Decoding of int4 weights on the GPU. Reference: `kernels.quantize.dequantize_int4`."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.linear.skinny_parts import GROUP
from kernels.quantize import Int4Weight


@triton.jit
def _dequantize_kernel(packed, scale, zero, out, N, K, BLOCK_N: tl.constexpr):
    quarter: tl.constexpr = GROUP // 4
    group = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < N
    at = group.to(tl.int64) * N + row
    c = tl.arange(0, quarter)
    words = tl.load(packed + at[:, None] * quarter + c[None, :], mask=inside[:, None], other=0)
    factor = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(zero + at, mask=inside, other=0).to(tl.float32)
    place = out + row.to(tl.int64)[:, None] * K + group * GROUP + c[None, :]
    for i in tl.static_range(4):
        value = (((words >> (4 * i)) & 15).to(tl.float32) - offset[:, None]) * factor[:, None]
        tl.store(place + i * quarter, value.to(out.dtype.element_ty), mask=inside[:, None])


def dequantize(weight: Int4Weight, dtype: torch.dtype, *, out: Tensor | None = None, block_n: int = 64) -> Tensor:
    """The matrix as a product of many rows wants it: decoded once, then multiplied by the vendor's kernel.

    Args:
        weight: [N, K].
        dtype: of the result.
        out: [N, K] contiguous, where to write.

    Returns:
        [N, K] in dtype, as the reference gives it.

    Raises:
        ValueError: ``out`` has another shape or is not contiguous.
    """
    outputs, inputs = weight.shape
    if out is None:
        out = torch.empty(outputs, inputs, dtype=dtype, device=weight.device)
    if out.shape != (outputs, inputs) or not out.is_contiguous():
        raise ValueError(f"dequantize: out must be contiguous [{outputs}, {inputs}], got {tuple(out.shape)}")
    _dequantize_kernel[(triton.cdiv(outputs, block_n), inputs // GROUP.value)](
        weight.packed, weight.scale, weight.zero, out, outputs, inputs, BLOCK_N=block_n, num_warps=4
    )
    return out
