"""The kernel of `skinny_linear` for up to 16 rows: weights go from memory to the registers of the tensor cores.

mma.m16n8k16 wants of a row of its left operand, in each thread, two neighbours and the two 8 further on; memory is read
best in 16 bytes a thread. A product does not care in which order K is summed, so what a thread reads, 8 neighbours, is
named as the k of two such instructions. Tiles are [8 rows, blocks of 32 words, groups of rows, 32 words]: a warp reads
8 rows of 64 bytes, and what reshape and permute make of it is where the registers are already. The warps of a program
share K and add up at the end.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.delta.conv1d import conv_prefetch
from kernels.gpu.linear.skinny_parts import (
    DENSE,
    FP8,
    GROUP,
    INT4,
    finish,
    prefetch_tile,
    row_of,
    squares_ahead,
    tile_columns,
    unpack,
    weight_rows,
)
from kernels.gpu.lora.batch import adapters_ahead, add_adapters, hidden_ahead


@triton.jit
def _load_words(
    weight, at, k, N, S: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr
):
    """Tile number S of the weight: [8, WORDS / 32, groups of rows, 32]."""
    parts: tl.constexpr = 4 if KIND == INT4 else (2 if KIND == FP8 else 1)
    place = weight + at + (N.to(tl.int64) * (S * WORDS) if KIND == INT4 else S * WORDS)
    if EVEN:
        return tl.load(place, eviction_policy="evict_first")
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return tl.load(place, mask=S * WORDS * parts + k < K, other=0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["M"])
def stream_kernel(
    x,
    weight,
    scale,
    zero,
    around,
    lora,
    M,
    N,
    x_stride,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    PREFETCH: tl.constexpr,
    SWIGLU: tl.constexpr,
    LORA: tl.constexpr,
    PARTS: tl.constexpr,
    CONV: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program for BLOCK_N rows of the weight, all of K, BLOCK_M rows of x."""
    tile = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    parts: tl.constexpr = 4 if KIND == INT4 else (2 if KIND == FP8 else 1)
    apart: tl.constexpr = GROUP // parts
    words: tl.constexpr = BLOCK_K // parts
    blocks: tl.constexpr = words // 32
    turns: tl.constexpr = blocks // WARPS
    high: tl.constexpr = BLOCK_N // 8
    wide: tl.constexpr = BLOCK_M // 8
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    even: tl.constexpr = K % BLOCK_K == 0
    eight = tl.arange(0, 8)[:, None, None, None]
    block = tl.arange(0, blocks)[None, :, None, None]
    j = tl.arange(0, 32)[None, None, None, :]
    row = row_of(tl.arange(0, high)[None, None, :, None] * 8 + eight, tile, N, BLOCK_N, SWIGLU)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, wide)[None, None, :, None] * 8 + eight
    c = block * 32 + j
    # The first input of each word; the others are `apart` further on each.
    k = c if KIND == DENSE else (c // apart) * GROUP + c % apart
    at = (block.to(tl.int64) * N + row) * 32 + j if KIND == INT4 else row.to(tl.int64) * (K // parts) + c
    held = ()
    for s in tl.static_range(AHEAD):
        if s < steps:
            held = held + (_load_words(weight, at, k, N, s, K, KIND, words, even),)  # noqa: RUF005
    columns, inside, first, last = tile_columns(tile, N, BLOCK_N, SWIGLU)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    if lora is not None:
        # Or the weights would be asked for when B is: after the numbers of its slots have come.
        tl.debug_barrier()
        ahead = adapters_ahead(lora, rows, columns, inside, first, M, N, 0, LORA)
    if PDL:
        if CONV > 0:
            conv_prefetch(around.conv, first, rows, M, CONV, BLOCK_N)
        if PREFETCH > 0 and KIND != INT4:
            size: tl.constexpr = 1 if KIND == FP8 else 2
            prefetch_tile(weight, tile + PREFETCH, tl.num_programs(0), N, K * size, BLOCK_N, SWIGLU)
        gdc_wait()
    squares = squares_ahead(around, rows, M, PARTS) if PARTS > 0 else None
    if lora is not None:
        hidden = hidden_ahead(lora, rows, first, M, LORA)
    acc = tl.zeros((WARPS, BLOCK_N, BLOCK_M), tl.float32)
    x_base = x + m.to(tl.int64) * x_stride
    for s in tl.static_range(steps):
        if s + AHEAD < steps:
            held = held + (_load_words(weight, at, k, N, s + AHEAD, K, KIND, words, even),)  # noqa: RUF005
        if KIND == INT4:
            group = tl.minimum(s * blocks + block, K // GROUP - 1).to(tl.int64) * N + row
            factor = tl.load(scale + group)
            offset = tl.load(zero + group)
        else:
            factor = None
            offset = None
        for part in tl.static_range(parts):
            here = s * BLOCK_K + part * apart + k if parts > 1 else s * BLOCK_K + k
            live = (m < M) & (here >= 0) if even else (m < M) & (here < K)
            value = tl.load(x_base + here, mask=live, other=0.0)
            number = held[s] if KIND == DENSE else unpack(held[s], offset, factor, part, KIND, value.dtype, INTERPRETED)
            left = tl.reshape(number, [8, turns, WARPS, high, 4, 2, 2, 2])
            left = tl.reshape(tl.permute(left, [2, 3, 0, 1, 5, 6, 4, 7]), [WARPS, BLOCK_N, turns * 32])
            right = tl.reshape(value, [8, turns, WARPS, wide, 4, 2, 2, 2])
            right = tl.reshape(tl.permute(right, [2, 1, 5, 6, 4, 7, 3, 0]), [WARPS, turns * 32, BLOCK_M])
            acc = tl.dot(left, right, acc, input_precision="ieee")
    total = tl.sum(acc, axis=0)
    if KIND == FP8:
        total *= tl.load(scale + weight_rows(tile, N, BLOCK_N, SWIGLU))[:, None]
    if lora is not None:
        total = add_adapters(total, ahead, hidden, lora, rows, columns, inside, first, last, M, N, LORA)
    finish(tl.trans(total), squares, None, around, tile, rows, M, N, K, BLOCK_N, BLOCK_M, SWIGLU, CONV)
