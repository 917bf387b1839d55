"""Experts of a few tokens: each token's experts stream their weights through registers, as if no other token had them.

As `kernels.gpu.linear.skinny_kernels.vector_kernel`, of which these are the grouped form. The second kernel adds up a
token's experts by itself, always in the same order, and knows them before the first one has ended: so its weights are
asked for meanwhile. Reference: `kernels.experts.pass_through`.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.experts.stack import rows_of, tensor_of
from kernels.gpu.launch.programmatic import wait
from kernels.gpu.linear.skinny_parts import (
    FP8,
    GROUP,
    INT4,
    finish,
    squares_ahead,
    unpack,
    unpack_to_float,
    weight_rows,
)


@triton.jit
def _words(values, row, total, first: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr):
    """Words of weight rows [rows, GROUPS, words of 128 inputs] from group ``first`` on."""
    words: tl.constexpr = GROUP // (4 if KIND == INT4 else (2 if KIND == FP8 else 1))
    group = first + tl.arange(0, GROUPS)[None, :, None]
    c = tl.arange(0, words)[None, None, :]
    if KIND == INT4:
        place = values + (group.to(tl.int64) * total + row[:, None, None]) * words + c
    else:
        place = (
            values + row.to(tl.int64)[:, None, None] * (K // GROUP * words if KIND == FP8 else K) + group * words + c
        )
    if (first + GROUPS) * GROUP <= K:
        return tl.load(place, eviction_policy="evict_first")
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return tl.load(place, mask=group * GROUP + c < K, other=0, eviction_policy="evict_first")


@triton.jit
def _of_groups(pointer, row, total, first: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr):
    """What rows [rows, GROUPS] have for each group of int4."""
    group = first + tl.arange(0, GROUPS)[None, :]
    return tl.load(pointer + group.to(tl.int64) * total + row[:, None], mask=group * GROUP < K, other=0)


@triton.jit
def _ask(
    stack,
    expert,
    row,
    EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Rows of an expert's matrix, asked for: their words and, in int4, factors and offsets, each in chunks of GROUPS
    groups."""
    first, total = rows_of(stack, expert, EXPERTS, N)
    own = first + row
    values = tensor_of(stack.words, stack.shared_words, expert, EXPERTS)
    scale = tensor_of(stack.scale, stack.shared_scale, expert, EXPERTS) if KIND == INT4 else None
    zero = tensor_of(stack.zero, stack.shared_zero, expert, EXPERTS) if KIND == INT4 else None
    words, factors, offsets = (), (), ()
    for chunk in tl.static_range((K + GROUPS * GROUP - 1) // (GROUPS * GROUP)):
        words = words + (_words(values, own, total, chunk * GROUPS, K, KIND, GROUPS),)  # noqa: RUF005
        if KIND == INT4:
            factors = factors + (_of_groups(scale, own, total, chunk * GROUPS, K, GROUPS),)  # noqa: RUF005
            offsets = offsets + (_of_groups(zero, own, total, chunk * GROUPS, K, GROUPS),)  # noqa: RUF005
    return words, factors, offsets


@triton.jit
def _scales(stack, expert, row, EXPERTS: tl.constexpr, N: tl.constexpr):
    """Factors of an expert's rows in float8."""
    first, _ = rows_of(stack, expert, EXPERTS, N)
    return tl.load(tensor_of(stack.scale, stack.shared_scale, expert, EXPERTS) + first + row)


@triton.jit
def _sums(asked, x, K: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Products of weight rows, from _ask(), with a row of x, [rows, GROUPS, words / 8]: of each thread's 16 bytes of
    words. In float8 not scaled yet."""
    words, factors, offsets = asked
    parts: tl.constexpr = 4 if KIND == INT4 else (2 if KIND == FP8 else 1)
    apart: tl.constexpr = GROUP // parts
    rows: tl.constexpr = words[0].shape[0]
    every = tl.zeros((rows, GROUPS, apart // 8), tl.float32)
    for chunk in tl.static_range((K + GROUPS * GROUP - 1) // (GROUPS * GROUP)):
        base = (chunk * GROUPS + tl.arange(0, GROUPS)[None, :, None]) * GROUP + tl.arange(0, apart)[None, None, :]
        total = tl.zeros((rows, GROUPS, apart // 8), tl.float32)
        for part in tl.static_range(parts):
            k = base + part * apart
            value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
            if KIND == FP8:
                number = unpack_to_float(words[chunk], part, INTERPRETED)
            elif KIND == INT4:
                offset = offsets[chunk][:, :, None]
                number = unpack(words[chunk], offset, None, part, KIND, tl.bfloat16, INTERPRETED).to(tl.float32)
            else:
                number = words[chunk].to(tl.float32)
            total += tl.sum(tl.reshape(number * value, [rows, GROUPS, apart // 8, 8]), axis=3)
        if KIND == INT4:
            total *= factors[chunk].to(tl.float32)[:, :, None]
        every += total
    return every


@triton.jit(do_not_specialize=["M"])
def streamed_gate_up_kernel(
    x,
    around,
    experts,
    stack,
    M,
    x_stride,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program for BLOCK_N rows of an expert, half of them gate rows, and a token that it is chosen by."""
    tile = tl.program_id(0)
    pair = tl.program_id(1)
    token = pair // CHOSEN
    row = weight_rows(tile, N, BLOCK_N, True)
    if PDL:
        wait(True)  # so that the kernel behind, once it runs, finds the experts
    expert = tl.load(experts + pair)
    asked = _ask(stack, expert, row, EXPERTS, N, K, KIND, GROUPS)
    m = token + tl.arange(0, 1)
    squares = squares_ahead(around, m, M, PARTS) if PARTS > 0 else None
    acc = _sums(asked, x + token.to(tl.int64) * x_stride, K, KIND, GROUPS, INTERPRETED)
    result = tl.sum(tl.sum(acc, axis=2), axis=1)
    if KIND == FP8:
        result *= _scales(stack, expert, row, EXPERTS, N)
    place = pair + tl.arange(0, 1)
    finish(result[None, :], squares, None, around, tile, place, pair + 1, N, K, BLOCK_N, 1, True, 0)


@triton.jit(do_not_specialize=["M"])
def streamed_down_kernel(
    x,
    around,
    experts,
    weights,
    stack,
    M,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program for BLOCK_N columns of the result of a token: all of its experts."""
    tile = tl.program_id(0)
    token = tl.program_id(1)
    row = weight_rows(tile, N, BLOCK_N, False)
    if PDL:
        gdc_launch_dependents()
    held, shares = (), ()
    for j in tl.static_range(CHOSEN):
        expert = tl.load(experts + token * CHOSEN + j)
        held = held + (_ask(stack, expert, row, EXPERTS, N, K, KIND, GROUPS),)  # noqa: RUF005
        share = tl.load(weights + token * CHOSEN + j)
        if KIND == FP8:
            share = (share * _scales(stack, expert, row, EXPERTS, N))[:, None, None]
        shares = shares + (share,)  # noqa: RUF005
    if PDL:
        gdc_wait()
    eighths: tl.constexpr = GROUP // (8 * (4 if KIND == INT4 else (2 if KIND == FP8 else 1)))
    every = tl.zeros((BLOCK_N, GROUPS, eighths), tl.float32)
    for j in tl.static_range(CHOSEN):
        source = x + (token * CHOSEN + j).to(tl.int64) * K
        every += _sums(held[j], source, K, KIND, GROUPS, INTERPRETED) * shares[j]
    result = tl.sum(tl.sum(every, axis=2), axis=1)
    m = token + tl.arange(0, 1)
    finish(result[None, :], None, None, around, tile, m, M, N, K, BLOCK_N, 1, False, 0)
