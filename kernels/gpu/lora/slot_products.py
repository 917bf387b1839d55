"""Products of the adapters of several jobs in one training step: rows of each job with its own factors.

A batch's rows are cut into slots, consecutive rows each. ``slot_product`` multiplies rows with their slot's matrix,
``slot_gradient`` sums over a slot's rows into its gradient. Nothing is read of another slot's rows: a row that is not
finite stays in its own. Reference: torch's products of each slot by itself.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_NARROW = 64
"""Outputs up to which a program makes all of them, and walks along long inputs."""
_LOAD = 256
"""Bytes of a row that such a program loads at once."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Rows of a batch by slot. Both tensors are read on the device, so that a captured CUDA graph serves any slots."""

    begin: Tensor
    """[slots + 1] int32: first row of each slot, and the end of the last one."""
    gradients: Tensor
    """[2, slots] int64: addresses of each slot's gradients in its A and in its B, float32."""

    @property
    def count(self) -> int:
        return self.gradients.shape[1]

    @classmethod
    def build(
        cls, rows: Sequence[int], gradients: Sequence[tuple[Tensor, Tensor]], device: torch.device | str
    ) -> Slots:
        """Slots of so many rows each, in order.

        Args:
            gradients: flat float32 tensors of the gradients in A and B of each slot. They must stay where they are for
                as long as these slots are used.

        Raises:
            ValueError: the numbers of slots differ, or a gradient is not float32 or not in one piece.
        """
        if len(rows) != len(gradients) or not rows:
            raise ValueError(f"{len(rows)} slots with {len(gradients)} gradients")
        if any(one.dtype != torch.float32 or not one.is_contiguous() for pair in gradients for one in pair):
            raise ValueError("gradients must be float32, in one piece")
        begin = torch.zeros(len(rows) + 1, dtype=torch.int32)
        begin[1:] = torch.cumsum(torch.tensor(rows, dtype=torch.int32), 0)
        places = torch.tensor([[pair[side].data_ptr() for pair in gradients] for side in (0, 1)], dtype=torch.int64)
        return cls(begin.to(device), places.to(device))


@triton.jit
def _tile(begin, number, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Slot of a tile (SLOTS: there are fewer tiles), its first row, and the end of the slot's rows."""
    i = tl.arange(0, triton.next_power_of_2(SLOTS))
    start = tl.load(begin + i, mask=i < SLOTS, other=0)
    end = tl.load(begin + 1 + i, mask=i < SLOTS, other=0)
    tiles = (end - start + BLOCK - 1) // BLOCK
    slot = tl.sum((tl.cumsum(tiles, axis=0) <= number).to(tl.int32), axis=0)
    before = tl.sum(tl.where(i < slot, tiles, 0), axis=0)
    first = tl.sum(tl.where(i == slot, start, 0), axis=0) + (number - before) * BLOCK
    return tl.minimum(slot, SLOTS), first, tl.sum(tl.where(i == slot, end, 0), axis=0)


@triton.jit
def _product_kernel(
    x, begin, weight, out, outputs, inputs, x_stride, out_stride, slot_stride, n_stride, k_stride,
    SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program for BLOCK_M rows of a slot and BLOCK_N outputs."""
    slot, first, end = _tile(begin, tl.program_id(0), SLOTS, BLOCK_M)
    if slot < SLOTS:
        row = first + tl.arange(0, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        here, wanted = row < end, n < outputs
        left = x + row.to(tl.int64)[:, None] * x_stride
        right = weight + slot.to(tl.int64) * slot_stride + n.to(tl.int64)[None, :] * n_stride
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
            k = start + tl.arange(0, BLOCK_K)
            inside = k < inputs
            values = tl.load(left + k[None, :], mask=here[:, None] & inside[None, :], other=0.0)
            factors = tl.load(
                right + k.to(tl.int64)[:, None] * k_stride, mask=inside[:, None] & wanted[None, :], other=0.0
            )
            acc = tl.dot(values, factors, acc, input_precision="ieee")
        target = out + row.to(tl.int64)[:, None] * out_stride + n[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=here[:, None] & wanted[None, :])


def slot_product(x: Tensor, slots: Slots, weights: Tensor, out: Tensor) -> None:
    """``out[t] = weights[slot of t] @ x[t]``; rows of no slot stay as they are.

    Args:
        x: [T, inputs], rows contiguous.
        weights: [slots, outputs, inputs] of any strides, in x's dtype.
        out: [T, outputs], rows contiguous.

    Raises:
        ValueError: shapes do not fit.
    """
    (rows, inputs), outputs = x.shape, out.shape[1]
    if weights.shape != (slots.count, outputs, inputs) or len(out) != rows or x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(
            f"slot_product: {tuple(x.shape)} to {tuple(out.shape)} by {tuple(weights.shape)}, {slots.count} slots"
        )
    narrow = outputs <= _NARROW
    block_m = 32 if narrow else 64
    block_n = max(16, triton.next_power_of_2(outputs)) if narrow else 128
    block_k = max(16, min(triton.next_power_of_2(inputs), (_LOAD if narrow else _LOAD // 2) // x.itemsize))
    # A slot's last tile may be incomplete.
    grid = (rows // block_m + slots.count, triton.cdiv(outputs, block_n))
    _product_kernel[grid](
        x, slots.begin, weights, out, outputs, inputs, x.stride(0), out.stride(0), *weights.stride(),
        SLOTS=slots.count, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=3 if narrow else 2,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _gradient_kernel(
    left, right, begin, gradients, order, offset, scale, height, width, left_stride, right_stride,
    ORDERED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program for BLOCK_M rows and BLOCK_N columns of a slot's gradient."""
    slot = tl.program_id(2)
    first, end = tl.load(begin + slot), tl.load(begin + slot + 1)
    if first < end:
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        high, wide = m < height, n < width
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(first, end, BLOCK_T, num_stages=STAGES):
            row = start + tl.arange(0, BLOCK_T)
            here = row < end
            place = row.to(tl.int64)
            a = tl.load(left + place[None, :] * left_stride + m[:, None], mask=high[:, None] & here[None, :], other=0.0)
            b = tl.load(
                right + place[:, None] * right_stride + n[None, :], mask=here[:, None] & wide[None, :], other=0.0
            )
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if ORDERED:
            m = tl.load(order + m, mask=high, other=0).to(tl.int32)
        onto = tl.load(gradients + slot).to(tl.pointer_type(tl.float32)) + offset
        onto += m.to(tl.int64)[:, None] * width + n[None, :]
        inside = high[:, None] & wide[None, :]
        tl.store(onto, tl.load(onto, mask=inside, other=0.0) + scale * acc, mask=inside)


def slot_gradient(
    left: Tensor,
    right: Tensor,
    slots: Slots,
    side: int,
    offset: int,
    *,
    scale: float = 1.0,
    order: Tensor | None = None,
) -> None:
    """Adds ``scale · Σ left[t]ᵀ right[t]`` over each slot's rows to a matrix of its gradients, in float32.

    Args:
        left: [T, height], rows contiguous.
        right: [T, width], rows contiguous, in left's dtype.
        side: 0: the matrix is in the gradients of A; 1: of B.
        offset: its first number in the flat gradient; it is [height, width], contiguous.
        order: [height] int64: row of the matrix for each column of left; None: the same.

    Raises:
        ValueError: shapes do not fit.
    """
    (rows, height), width = left.shape, right.shape[1]
    if len(right) != rows or left.stride(1) != 1 or right.stride(1) != 1:
        raise ValueError(f"slot_gradient: {tuple(left.shape)} and {tuple(right.shape)}")

    most = 128 if min(height, width) <= _NARROW else 64
    block_m, block_n = (max(16, min(most, triton.next_power_of_2(size))) for size in (height, width))
    grid = (triton.cdiv(height, block_m), triton.cdiv(width, block_n), slots.count)
    _gradient_kernel[grid](
        left, right, slots.begin, slots.gradients[side], order, offset, scale, height, width, left.stride(0),
        right.stride(0), ORDERED=order is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_T=32, STAGES=2,
        num_warps=4,
    )  # fmt: skip
