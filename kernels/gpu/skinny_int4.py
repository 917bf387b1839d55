"""Products of a few rows with an int4 matrix, without tensor cores: the "vector" variant of `skinny_linear` for int4.

Decoding to floats takes more instructions than the weights take time to read. Here nothing is decoded: x becomes whole
numbers of 16 bits a group of 128 inputs, as two bytes, and ``dp4a`` multiplies four of them with four 4-bit numbers of
a word that was only masked. Two masks, one shift and four dp4a serve 8 weights. All sums of a group are exact; what is
rounded is x, once, to 2^-16 of the largest of its group (bfloat16: 2^-9 of each). Reference: `kernels.quantize`.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,var-annotated"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.lora import adapters_of_row_ahead, add_adapters_to_row, hidden_of_row_ahead
from kernels.gpu.skinny_parts import GROUP, finish, squares_ahead, tile_columns, weight_rows

MAX_ROWS = 4
"""Each row of x costs as many products again; from here on tensor cores are ahead."""
TILE = 8
"""Rows of the weight that a warp reads of a group at once: 8 · 64 bytes."""
_ROWS = tl.constexpr(TILE)
_LARGEST = tl.constexpr(127 * 256.0)
"""Of a whole number: its bytes are signed."""


class FixedPoint(NamedTuple):
    """x as whole numbers v and a factor a group: 256 · high byte + low byte."""

    words: Any
    """[M, K / 128, 4, 16] int32 of four bytes each: high bytes for bits 0 … 3 and 8 … 11 of the halves of a word of
    the weight, high bytes for the other bits, low bytes for the first, for the others."""
    factors: Any
    """[M, K / 128] float32."""
    sums: Any
    """[M, K / 128, 4] int32: v summed over every fourth of a group's words."""


@triton.jit
def _fix_kernel(x, words, factors, sums, x_stride, K: tl.constexpr, PDL: tl.constexpr):
    """One program: a group of a row."""
    group, r = tl.program_id(0), tl.program_id(1)
    groups: tl.constexpr = K // GROUP
    word = tl.arange(0, 16)[:, None, None]
    half = tl.arange(0, 2)[None, :, None]
    byte = tl.arange(0, 4)[None, None, :]
    k = group * GROUP + word * 2 + half * 32 + (byte % 2) * 64 + byte // 2
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + r * x_stride + k).to(tl.float32)
    at = r * groups + group
    factor = tl.maximum(tl.max(tl.abs(value)) / _LARGEST, 1e-30)
    # Adding and taking away 1.5 · 2^23 rounds to the nearest whole number.
    whole = ((value / factor + 12582912.0) - 12582912.0).to(tl.int32)
    tl.store(factors + at, factor)
    quarter = tl.sum(tl.reshape(whole, [4, 32]), axis=1)
    tl.store(sums + at * 4 + tl.arange(0, 4), quarter)
    high = (whole + 128) >> 8
    low = whole - high * 256
    place = words + at * 64 + half * 16 + word
    shift = byte * 8
    tl.store(place, tl.sum((high & 255) << shift, axis=2, keep_dims=True))
    tl.store(place + 32, tl.sum((low & 255) << shift, axis=2, keep_dims=True))


def fixed_point(x: Tensor, *, pdl: bool = False) -> FixedPoint:
    """x [M, K] for int4_vector_kernel."""
    rows, inputs = x.shape
    groups = inputs // GROUP.value
    fixed = FixedPoint(
        torch.empty(rows, groups, 4, 16, dtype=torch.int32, device=x.device),
        torch.empty(rows, groups, dtype=torch.float32, device=x.device),
        torch.empty(rows, groups, 4, dtype=torch.int32, device=x.device),
    )
    _fix_kernel[(groups, rows)](x, *fixed, x.stride(0), K=inputs, PDL=pdl, num_warps=1, launch_pdl=pdl)
    return fixed


@triton.jit
def _add_products(weight, x, acc, INTERPRETED: tl.constexpr):
    """acc plus the four products of the bytes of weight (0 … 15) and x (-128 … 127)."""
    if INTERPRETED:
        for i in tl.static_range(4):
            acc += ((weight >> (8 * i)) & 255) * (((x >> (8 * i)) << 24) >> 24)
        return acc
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [weight, x, acc], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def int4_vector_kernel(
    x,
    weight,
    scale,
    zero,
    around,
    lora,
    N,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SWIGLU: tl.constexpr,
    LORA: tl.constexpr,
    PARTS: tl.constexpr,
    CONV: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N rows of the weight, 8 at a time, all of K held in registers, BLOCK_G groups a turn, against
    each row of x (FixedPoint) in turn. A group's factors go on its whole sums, not on its weights."""
    groups: tl.constexpr = K // GROUP
    turns: tl.constexpr = (groups + BLOCK_G - 1) // BLOCK_G
    pieces: tl.constexpr = BLOCK_N // _ROWS
    whole: tl.constexpr = groups % BLOCK_G == 0
    g = tl.arange(0, BLOCK_G)[:, None, None]
    j = tl.arange(0, 16)[None, None, :]
    quarter = tl.arange(0, 4)[None, None, :]
    if PDL:
        gdc_launch_dependents()
    held = ()
    for piece in tl.static_range(pieces):
        piece_row = weight_rows(tl.program_id(0) * pieces + piece, N, _ROWS, SWIGLU)
        for turn in tl.static_range(turns):
            # Past the last group x is zero and the weight is of some group that exists.
            begin = turn * BLOCK_G if whole else tl.where(g + turn * BLOCK_G < groups, turn * BLOCK_G, groups - 1 - g)
            source = weight + ((g * N + piece_row[None, :, None]) * 16 + j) + tl.cast(begin * N, tl.int64) * 16
            held = held + (tl.load(source, eviction_policy="evict_first"),)  # noqa: RUF005
    if PDL:
        gdc_wait()
    # Not unrolled, nothing moved out of the loop: masked words of all rows at once would not fit the registers.
    for r in tl.range(0, ROWS, loop_unroll_factor=1, disable_licm=True):
        m = r + tl.arange(0, 1)
        squares = squares_ahead(around, m, ROWS, PARTS) if PARTS > 0 else None
        accs = ()
        for _ in tl.static_range(pieces):
            accs = accs + (tl.zeros((BLOCK_G, _ROWS, 4), tl.float32),)  # noqa: RUF005
        words = x.words + r * (groups * 64) + (g * 64 + j + tl.zeros((1, _ROWS, 1), tl.int32))
        for turn in tl.static_range(turns):
            step = turn * BLOCK_G if whole else tl.where(g + turn * BLOCK_G < groups, turn * BLOCK_G, groups - 1 - g)
            ahead = words + step * 64
            x0, x1, x2, x3 = tl.load(ahead), tl.load(ahead + 16), tl.load(ahead + 32), tl.load(ahead + 48)
            live = turn * BLOCK_G + g < groups
            factor = tl.load(x.factors + r * groups + g + step, mask=live, other=0.0)
            less = tl.load(x.sums + (r * groups + g + step) * 4 + quarter)
            sums = ()
            for piece in tl.static_range(pieces):
                row = weight_rows(tl.program_id(0) * pieces + piece, N, _ROWS, SWIGLU)
                w = held[piece * turns + turn]
                first = w & 0x0F0F0F0F
                second = (w >> 4) & 0x0F0F0F0F
                nothing = tl.zeros_like(w)
                high = _add_products(second, x1, _add_products(first, x0, nothing, INTERPRETED), INTERPRETED)
                low = _add_products(second, x3, _add_products(first, x2, nothing, INTERPRETED), INTERPRETED)
                total = tl.sum(tl.reshape(high * 256 + low, [BLOCK_G, _ROWS, 4, 4]), axis=3)
                at = (g + step) * N + row[None, :, None]
                total -= tl.load(zero + at).to(tl.int32) * less
                share = total.to(tl.float32) * (tl.load(scale + at).to(tl.float32) * factor)
                sums = sums + (accs[piece] + share,)  # noqa: RUF005
            accs = sums
        for piece in tl.static_range(pieces):
            tile = tl.program_id(0) * pieces + piece
            total = tl.sum(tl.sum(accs[piece], axis=2), axis=0)
            if lora is not None:
                columns, inside, _, _ = tile_columns(tile, N, _ROWS, SWIGLU)
                ahead = adapters_of_row_ahead(lora, r, columns, inside, N, LORA)
                hidden = hidden_of_row_ahead(lora, r, columns, inside, 0, ROWS, LORA)
                total = add_adapters_to_row(total, ahead, hidden, lora, r, columns, inside, ROWS, N, LORA)
            finish(total[None, :], squares, None, around, tile, m, ROWS, N, K, _ROWS, 1, SWIGLU, CONV)
