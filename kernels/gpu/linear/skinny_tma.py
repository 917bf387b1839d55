"""The kernel of `skinny_linear` for 2 to 64 rows: weights and x go from memory to shared memory by the bulk copy engine
and from there to the tensor cores (wgmma), and no thread touches them.

A row of the weight is a row of the accumulator, the rows of x are its columns. x comes in the form that is multiplied:
in float8 where the weight is (kernels.gpu.linear.preparation). All programs are resident at once, each with many tiles
on their way, so memory decides how fast each gets on, and it does not matter that some multiprocessors have more
programs than others.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gpu.delta.conv1d import conv_prefetch
from kernels.gpu.linear.skinny_parts import FP8, add_splits, finish, prefetch_rows, squares_ahead, weight_rows
from kernels.gpu.lora.batch import adapters_ahead, add_adapters, hidden_ahead


@triton.jit
def _dot(left, right, acc, INTERPRETED: tl.constexpr, PROMOTE: tl.constexpr):
    if PROMOTE > 0:
        if INTERPRETED:
            return tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision="ieee")
        else:  # noqa: RET505 (Triton compiles what follows a return)
            # The tensor cores add float8 products with about 14 bits: sums of PROMOTE of them are added in float32.
            return tl.dot(left, right, acc, max_num_imprecise_acc=PROMOTE)
    else:
        return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["M"])
def tma_kernel(
    x,
    x_scale,
    weight,
    values,
    scale,
    around,
    lora,
    partials,
    counters,
    M,
    N,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    STAGGER: tl.constexpr,
    PREFETCH: tl.constexpr,
    SWIGLU: tl.constexpr,
    LORA: tl.constexpr,
    PARTS: tl.constexpr,
    CONV: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program for BLOCK_N rows of the weight (with SWIGLU half of them gate rows), a SPLITS-th of K, BLOCK_M rows of
    x. ``x`` and ``weight`` are descriptors of tiles of BLOCK_K columns, ``values`` is the weight itself."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = weight_rows(tile, N, BLOCK_N, SWIGLU)
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    share: tl.constexpr = (steps + SPLITS - 1) // SPLITS
    high: tl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N
    promote: tl.constexpr = BLOCK_K if KIND == FP8 else 0
    first = split * share
    # Programs that begin at different columns do not all want the same lines of x, and channels of memory, at once.
    turn = tile * 3 % share if STAGGER else 0
    m0 = tl.program_id(2) * BLOCK_M
    m = m0 + tl.arange(0, BLOCK_M)
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            size: tl.constexpr = 1 if KIND == FP8 else 2
            prefetch_rows(values, row, (first + turn) * BLOCK_K * size, PREFETCH, K * size)
        if CONV > 0:
            conv_prefetch(around.conv, tile * BLOCK_N, m, M, CONV, BLOCK_N)
    n0 = tile * high
    column = n0 + tl.arange(0, high)
    end = N // 2 if SWIGLU else N
    if lora is not None:
        ahead = adapters_ahead(lora, m, column, column < end, n0, M, N, split, LORA)
        if SWIGLU:
            other_ahead = adapters_ahead(lora, m, column + end, column < end, n0 + end, M, N, split, LORA)
    if PDL:
        gdc_wait()
    squares = squares_ahead(around, m, M, PARTS) if PARTS > 0 else None
    if KIND == FP8:
        factor = tl.load(x_scale + m, mask=m < M, other=0.0)
    if lora is not None:
        adding = tl.where(split == 0, m, M)
        hidden = hidden_ahead(lora, adding, n0, M, LORA)
        if SWIGLU:
            other_hidden = hidden_ahead(lora, adding, n0 + end, M, LORA)
    last = tl.minimum(n0 + high, end) - 1
    acc = tl.zeros((high, BLOCK_M), tl.float32)
    if SWIGLU:
        other = tl.zeros((high, BLOCK_M), tl.float32)
        for step in tl.range(0, share, num_stages=STAGES):
            k = (first + (step + turn) % share if STAGGER else first + step) * BLOCK_K
            gate = weight.load([n0, k])
            up = weight.load([N // 2 + n0, k])
            right = tl.trans(x.load([m0, k]))
            acc = _dot(gate, right, acc, INTERPRETED, promote)
            other = _dot(up, right, other, INTERPRETED, promote)
        if KIND == FP8:
            other *= tl.load(scale + end + tl.minimum(column, end - 1))[:, None]
            other *= factor[None, :]
        if lora is not None:
            other = add_adapters(
                other, other_ahead, other_hidden, lora, m, column + end, column < end, n0 + end, last + end, M, N, LORA,
                True,
            )  # fmt: skip
    else:
        for step in tl.range(0, share, num_stages=STAGES):
            k = (first + (step + turn) % share if STAGGER else first + step) * BLOCK_K
            left = weight.load([n0, k])
            right = tl.trans(x.load([m0, k]))
            acc = _dot(left, right, acc, INTERPRETED, promote)
    if KIND == FP8:
        acc *= tl.load(scale + tl.minimum(column, end - 1))[:, None]
        acc *= factor[None, :]
    if lora is not None:
        acc = add_adapters(acc, ahead, hidden, lora, m, column, column < end, n0, last, M, N, LORA, SWIGLU)
    if SWIGLU:
        # [BLOCK_M, gate rows | up rows], as finish() wants them.
        both = tl.permute(tl.join(tl.trans(acc), tl.trans(other)), [0, 2, 1])
        total = tl.reshape(both, [BLOCK_M, BLOCK_N])
    else:
        total = tl.trans(acc)
    mine = True
    if SPLITS > 1:
        place = tl.arange(0, BLOCK_N)[None, :] * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        block = tl.program_id(2) * tl.num_programs(0) + tile
        # As many at a time as there are registers for.
        together: tl.constexpr = max(1, min(8, 16384 // (BLOCK_N * BLOCK_M)))
        total, mine = add_splits(total, place, split, block, partials, counters, SPLITS, together)
    if mine:
        finish(total, squares, None, around, tile, m, M, N, K, BLOCK_N, BLOCK_M, SWIGLU, CONV)


def tile_descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor with which the copy engine finds tiles [rows, columns] of a matrix; past its end they are zero.

    A matrix whose rows do not begin at multiples of 16 bytes is copied first.
    """
    size = matrix.element_size()
    if matrix.data_ptr() % 16 or matrix.stride(0) * size % 16:
        if matrix.shape[1] * size % 16:
            raise ValueError(f"skinny_linear: the tma variant needs rows of a multiple of 16 bytes, got {matrix.shape}")
        matrix = matrix.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
