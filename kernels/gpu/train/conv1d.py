"""Backward of the causal convolution with SiLU over packed documents. Reference: autograd through
`kernels.conv1d.causal_conv_packed`."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementary import sigmoid_for
from kernels.gpu.segments import TILE
from kernels.gpu.train.documents import Documents


@triton.jit
def _backward_kernel(
    x,
    weight,
    grad,
    out,
    begins,
    tile_segment,
    tile_row,
    past,
    past_grad,
    channels,
    x_stride,
    grad_stride,
    out_stride,
    KERNEL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    part = tl.program_id(1)
    tile = part // (TILE_ROWS // ROWS)
    segment = tl.load(tile_segment + tile)
    if segment < 0:
        return
    begin = tl.load(begins + segment)
    end = tl.load(begins + segment + 1)
    first = tl.load(tile_row + tile) + part % (TILE_ROWS // ROWS) * ROWS
    if first >= end:
        return
    taps = ()
    for tap in tl.static_range(KERNEL):
        taps = taps + (tl.load(weight + tap * channels + channel, mask=inside, other=0.0).to(tl.float32),)  # noqa: RUF005
    # An input reaches the outputs of its own row and of the KERNEL - 1 rows behind, which the same inputs make.
    inputs = ()
    for source in tl.static_range(ROWS + 2 * (KERNEL - 1)):
        row = first + (source - (KERNEL - 1))
        here = inside & (row >= begin) & (row < end)
        value = tl.load(x + row.to(tl.int64) * x_stride + channel, mask=here, other=0.0)
        if past is not None and source < KERNEL - 1:
            before = past + (segment * (KERNEL - 1) + (row - begin) + (KERNEL - 1)).to(tl.int64) * channels + channel
            value = tl.where(row < begin, tl.load(before, mask=inside & (row < begin), other=0.0), value)
        inputs = inputs + (value.to(tl.float32),)  # noqa: RUF005
    slopes = ()
    for source in tl.static_range(ROWS + KERNEL - 1):
        row = first + source
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(KERNEL):
            total += inputs[source + tap] * taps[tap]
        dy = tl.load(grad + row.to(tl.int64) * grad_stride + channel, mask=inside & (row < end), other=0.0)
        open_ = sigmoid_for(total, out.dtype.element_ty)
        slopes = slopes + (dy.to(tl.float32) * (open_ + total * open_ * (1.0 - open_)),)  # noqa: RUF005
    for r in tl.static_range(ROWS):
        row = first + r
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(KERNEL):
            total += slopes[r + (KERNEL - 1) - tap] * taps[tap]
        tl.store(
            out + row.to(tl.int64) * out_stride + channel, total.to(out.dtype.element_ty), mask=inside & (row < end)
        )

    if past_grad is not None:
        # What came before reaches the first outputs.
        for source in tl.static_range(KERNEL - 1):
            total = tl.zeros([BLOCK], tl.float32)
            for tap in tl.static_range(source + 1):
                total += slopes[source - tap] * taps[tap]
            place = (segment * (KERNEL - 1) + source).to(tl.int64) * channels
            tl.store(past_grad + place + channel, total, mask=inside & (first == begin))


@triton.jit
def _past_kernel(past_grad, rows, begins, places, out, channels, out_stride, BLOCK: tl.constexpr):
    """Adds to the gradient of a row those that it has in the histories of documents behind."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    at = tl.program_id(1)
    target = out + tl.load(rows + at) * out_stride + channel
    total = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    for number in tl.range(tl.load(begins + at), tl.load(begins + at + 1)):
        place = tl.load(places + number).to(tl.int64) * channels
        total += tl.load(past_grad + place + channel, mask=inside, other=0.0)
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


def conv_backward(
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    documents: Documents,
    *,
    out: Tensor,
    past: Tensor | None = None,
    rows: int = 16,
    block: int = 256,
    num_warps: int = 2,
) -> None:
    """Gradient in x of ``y[t] = silu(Σ_j weight[j] · x[t − (kernel − 1) + j])`` within each document and to what it
    goes on from.

    Args:
        x: [T, width ≥ channels], the forward's inputs in the first columns; rows contiguous.
        weight: [kernel, channels], frozen.
        grad: [T, channels], dy.
        documents: those that the rows are of.
        out: [T, width ≥ channels], whose first columns get the gradient. Not ``x`` or ``grad``.
        past: [S, kernel − 1, channels] contiguous, inputs before each document (Tree.past()), whose rows get their part
            of the gradient; None: nothing comes before any, as only without a tree.
        rows, block, num_warps: rows (a power of two up to TILE), channels and warps of a program.

    Raises:
        ValueError: shapes do not fit.
    """
    kernel, channels = weight.shape
    segments, tree = documents.segments, documents.tree
    if (past is None) != (tree is None) or (past is not None and past.shape != (documents.count, kernel - 1, channels)):
        raise ValueError("conv_backward: what comes before documents is needed where some go on from others")
    if past is not None and rows < kernel - 1:
        raise ValueError(f"conv_backward: the first {rows} rows do not see all of {kernel - 1} before them")
    if grad.shape != (x.shape[0], channels) or min(x.shape[1], out.shape[1]) < channels or out.shape[0] != x.shape[0]:
        raise ValueError(f"conv_backward: x {tuple(x.shape)}, weight {tuple(weight.shape)}, grad {tuple(grad.shape)}")
    if any(tensor.stride(1) != 1 for tensor in (x, grad, out)) or not weight.is_contiguous():
        raise ValueError("conv_backward: rows must be contiguous")
    if segments.max_tiles:
        block = min(block, triton.next_power_of_2(channels))
        past_grad = None if past is None else torch.empty_like(past, dtype=torch.float32)
        _backward_kernel[(triton.cdiv(channels, block), segments.max_tiles * (TILE // rows))](
            x,
            weight,
            grad,
            out,
            segments.begin,
            segments.tile_segment,
            segments.tile_row,
            past,
            past_grad,
            channels,
            x.stride(0),
            grad.stride(0),
            out.stride(0),
            KERNEL=kernel,
            ROWS=rows,
            BLOCK=block,
            TILE_ROWS=TILE,
            num_warps=num_warps,
        )
        if tree is not None and len(tree.seen):
            _past_kernel[(triton.cdiv(channels, block), len(tree.seen))](
                past_grad,
                tree.seen,
                tree.seen_begin,
                tree.seen_by,
                out,
                channels,
                out.stride(0),
                BLOCK=block,
                num_warps=num_warps,
            )
