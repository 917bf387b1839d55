"""The two kernels of `skinny_linear`: products in registers for a few rows, tensor cores for up to 64 and beyond.

Both stream the weight once and are bound by memory. A row of the weight is a row of the accumulator: tensor cores take
their many rows from the weight, and the few rows of x are the narrow side. Weights, adapters and old inputs of a
convolution are asked for before the kernels ahead have ended (kernels.gpu.launch.programmatic), what those write after
it.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.delta.conv1d import conv_ahead, conv_prefetch, conv_slots
from kernels.gpu.linear.skinny_parts import (
    DENSE,
    FP8,
    GROUP,
    INT4,
    add_splits,
    finish,
    prefetch_rows,
    prefetch_tile,
    squares_ahead,
    tile_columns,
    unpack,
    unpack_to_float,
    weight_rows,
)
from kernels.gpu.lora.batch import (
    adapters_ahead,
    adapters_of_row_ahead,
    add_adapters,
    add_adapters_to_row,
    hidden_ahead,
    hidden_of_row_ahead,
)


@triton.jit
def vector_kernel(
    x,
    weight,
    scale,
    around,
    lora,
    N,
    x_stride,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    SWIGLU: tl.constexpr,
    LORA: tl.constexpr,
    PARTS: tl.constexpr,
    CONV: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program for BLOCK_N rows of the weight, all of K held in registers, against each row of x in turn."""
    tile = tl.program_id(0)
    row = weight_rows(tile, N, BLOCK_N, SWIGLU)
    columns, inside, _, _ = tile_columns(tile, N, BLOCK_N, SWIGLU)
    # Numbers of a word, and how far apart in K they are.
    parts: tl.constexpr = 2 if KIND == FP8 else 1
    words: tl.constexpr = BLOCK_K // parts
    apart: tl.constexpr = GROUP // parts
    c = tl.arange(0, words)
    k = c if parts == 1 else (c // apart) * GROUP + c % apart
    chunks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    # A thread's 16 bytes are summed in the thread before sums leave it.
    sums: tl.constexpr = words // 8
    if PDL:
        gdc_launch_dependents()
    # What adapters and old inputs are looked up by comes before the weights, or each program would take two times of
    # waiting longer: for all of its weights and then for one number; they themselves come behind.
    adapters, slots = (), ()
    for r in tl.static_range(ROWS):
        if lora is not None:
            adapters = adapters + (tl.load(lora.row_adapters + r),)  # noqa: RUF005
        if CONV > 0:
            slots = slots + (conv_slots(around.conv, r + tl.arange(0, 1), ROWS),)  # noqa: RUF005
    w_base = weight + row.to(tl.int64)[:, None] * (K // parts) + c[None, :]
    held = ()
    for chunk in tl.static_range(chunks):
        if (chunk + 1) * BLOCK_K <= K:
            held = held + (tl.load(w_base + chunk * words, eviction_policy="evict_first"),)  # noqa: RUF005
        else:
            tail = (chunk * words + c < K // parts)[None, :]
            held = held + (tl.load(w_base + chunk * words, mask=tail, other=0, eviction_policy="evict_first"),)  # noqa: RUF005
    ahead, hidden, kept = (), (), ()
    if lora is not None or CONV > 0:
        # Or the weights would be asked for when B and old inputs are: after the number of a slot has come.
        tl.debug_barrier()
    for r in tl.static_range(ROWS):
        if lora is not None:
            ahead = ahead + (adapters_of_row_ahead(lora, adapters[r], columns, inside, N, LORA),)  # noqa: RUF005
        if CONV > 0:
            m = r + tl.arange(0, 1)
            kept = kept + (conv_ahead(around.conv, slots[r], columns, inside, m, ROWS, CONV),)  # noqa: RUF005
    if PDL:
        if PREFETCH > 0:
            size: tl.constexpr = 1 if KIND == FP8 else 2
            prefetch_tile(weight, tile + PREFETCH, tl.num_programs(0), N, K * size, BLOCK_N, SWIGLU)
        gdc_wait()
    if lora is not None:
        for r in tl.static_range(ROWS):
            hidden = hidden + (hidden_of_row_ahead(lora, r, columns, inside, 0, ROWS, LORA),)  # noqa: RUF005
    for r in tl.static_range(ROWS):
        m = r + tl.arange(0, 1)
        squares = squares_ahead(around, m, ROWS, PARTS) if PARTS > 0 else None
        acc = tl.zeros((BLOCK_N, sums), tl.float32)
        for chunk in tl.static_range(chunks):
            for part in tl.static_range(parts):
                at = chunk * BLOCK_K + k + part * apart
                value = tl.load(x + r * x_stride + at, mask=at < K, other=0.0).to(tl.float32)
                w = unpack_to_float(held[chunk], part, INTERPRETED) if KIND == FP8 else held[chunk].to(tl.float32)
                acc += tl.sum(tl.reshape(w * value[None, :], [BLOCK_N, sums, 8]), axis=2)
        total = tl.sum(acc, axis=1)
        if KIND == FP8:
            total *= tl.load(scale + row)
        if lora is not None:
            total = add_adapters_to_row(total, ahead[r], hidden[r], lora, r, columns, inside, ROWS, N, LORA)
        past = kept[r] if CONV > 0 else None
        finish(total[None, :], squares, past, around, tile, m, ROWS, N, K, BLOCK_N, 1, SWIGLU, CONV)


@triton.jit
def product(
    x,
    weight,
    scale,
    zero,
    row,
    m,
    M,
    N,
    first,
    x_stride,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Weight rows [BLOCK_N] times rows m of x over STEPS blocks of K from block ``first``. In int4 a block is one
    group, scaled after it is summed."""
    parts: tl.constexpr = 4 if KIND == INT4 else (2 if KIND == FP8 else 1)
    words: tl.constexpr = BLOCK_K // parts
    apart: tl.constexpr = GROUP // parts
    c = tl.arange(0, words)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    k = c if parts == 1 else (c // apart) * GROUP + c % apart
    x_base = x + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    w_base = weight + row.to(tl.int64)[:, None] * (K // parts) + c[None, :]
    for step in tl.range(0, STEPS, num_stages=STAGES):
        block = first + step
        if KIND == INT4:
            # Past the last group x is zero and the weight is of some group that exists.
            at = tl.minimum(block, K // GROUP - 1).to(tl.int64) * N + row
            w = tl.load(weight + at[:, None] * words + c[None, :])
            offset = tl.load(zero + at)[:, None]
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        else:
            offset = None
            total = acc
            if EVEN:
                w = tl.load(w_base + block * words)
            else:
                w = tl.load(w_base + block * words, mask=(block * words + c < K // parts)[None, :], other=0)
        for part in tl.static_range(parts):
            start = block * BLOCK_K + part * apart
            live = (m < M)[None, :]
            if not EVEN:
                live = live & (start + k < K)[:, None]
            value = tl.load(x_base + start, mask=live, other=0.0)
            number = w if KIND == DENSE else unpack(w, offset, None, part, KIND, value.dtype, INTERPRETED)
            total = tl.dot(number, value, total, input_precision="ieee")
        if KIND == INT4:
            acc += total * tl.load(scale + at).to(tl.float32)[:, None]
        else:
            acc = total
    return acc


@triton.jit(do_not_specialize=["M"])
def dot_kernel(
    x,
    weight,
    scale,
    zero,
    around,
    lora,
    partials,
    counters,
    M,
    N,
    x_stride,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    SWIGLU: tl.constexpr,
    LORA: tl.constexpr,
    PARTS: tl.constexpr,
    CONV: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program for BLOCK_N rows of the weight, a SPLITS-th of K, BLOCK_M rows of x."""
    tile = tl.program_id(0)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = weight_rows(tile, N, BLOCK_N, SWIGLU)
    columns, inside, low, high = tile_columns(tile, N, BLOCK_N, SWIGLU)
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    share: tl.constexpr = (steps + SPLITS - 1) // SPLITS
    split = tl.program_id(1)
    first = split * share
    even: tl.constexpr = share * SPLITS * BLOCK_K == K
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            if KIND == INT4:
                for g in tl.static_range(PREFETCH // (GROUP // 2)):
                    group = tl.minimum(first + g, steps - 1).to(tl.int64)
                    prefetch_rows(weight + group * N * (GROUP // 4), row, 0, GROUP // 2, GROUP // 2)
            else:
                size: tl.constexpr = 1 if KIND == FP8 else 2
                prefetch_rows(weight, row, first * BLOCK_K * size, PREFETCH, K * size)
        if CONV > 0:
            conv_prefetch(around.conv, low, m, M, CONV, BLOCK_N)
    if lora is not None:
        ahead = adapters_ahead(lora, m, columns, inside, low, M, N, split, LORA)
    if PDL:
        gdc_wait()
    squares = squares_ahead(around, m, M, PARTS) if PARTS > 0 else None
    if lora is not None:
        hidden = hidden_ahead(lora, tl.where(split == 0, m, M), low, M, LORA)
    acc = product(
        x, weight, scale, zero, row, m, M, N, first, x_stride,
        K, KIND, BLOCK_M, BLOCK_N, BLOCK_K, share, even, STAGES, INTERPRETED,
    )  # fmt: skip
    if KIND == FP8:
        acc *= tl.load(scale + row)[:, None]
    if lora is not None:
        acc = add_adapters(acc, ahead, hidden, lora, m, columns, inside, low, high, M, N, LORA)
    mine = True
    if SPLITS > 1:
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        block = tl.program_id(2) * tl.num_programs(0) + tile
        # As many at a time as there are registers for.
        acc, mine = add_splits(acc, place, split, block, partials, counters, SPLITS, 4)
    if mine:
        finish(tl.trans(acc), squares, None, around, tile, m, M, N, K, BLOCK_N, BLOCK_M, SWIGLU, CONV)
