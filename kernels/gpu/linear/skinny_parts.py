"""Parts that the kernels of `skinny_linear` share: which rows a program reads, decoding of quantized weights, prefetch,
and everything that follows the product."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.gpu.delta.conv1d import conv_ahead, conv_slots, conv_step
from kernels.gpu.elementary import inverse_root, silu
from kernels.gpu.launch.programmatic import prefetch_l2

DENSE = tl.constexpr(0)
FP8 = tl.constexpr(1)
INT4 = tl.constexpr(2)
GROUP = tl.constexpr(128)
"""Inputs that share a scale in int4."""
_LINE = tl.constexpr(128)
"""Bytes of a cache line of L2."""


class Around(NamedTuple):
    """Prologue and epilogue of a product of few rows, as a kernel takes them."""

    squares: Any
    """[parts, T] float32, summed over parts: Σx² of each row, where x comes through a norm; or None."""
    eps: Any
    """Epsilon of that norm."""
    residual: Any
    """[T, width] or None, and the stride of its rows."""
    residual_stride: Any
    out: Any
    """[T, width], and the stride of its rows."""
    out_stride: Any
    next_gain: Any = None
    """[N] float32: the weight of the norm that reads the result next; or None."""
    next_values: Any = None
    """[T, N]: the result times that weight."""
    next_squares: Any = None
    """[tiles, T] float32: the sum of squares of the result's columns in each tile."""
    conv: Any = None
    """A convolution of the result's first columns (kernels.gpu.delta.conv1d.Decodes); or None."""


@triton.jit
def row_of(i, tile, N, BLOCK_N: tl.constexpr, SWIGLU: tl.constexpr):
    """Row of the weight that is row i of a program's tile, clamped to the matrix. With SWIGLU the first half of the
    tile are gate rows and the second half the up rows that belong to them."""
    if SWIGLU:
        half: tl.constexpr = BLOCK_N // 2
        return tl.minimum(tile * half + i % half, N // 2 - 1) + (i // half) * (N // 2)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return tl.minimum(tile * BLOCK_N + i, N - 1)


@triton.jit
def weight_rows(tile, N, BLOCK_N: tl.constexpr, SWIGLU: tl.constexpr):
    """All rows of a program's tile [BLOCK_N], those that do not exist clamped to the matrix."""
    return row_of(tl.arange(0, BLOCK_N), tile, N, BLOCK_N, SWIGLU)


@triton.jit
def tile_columns(tile, N, BLOCK_N: tl.constexpr, SWIGLU: tl.constexpr):
    """The same as columns of the output before the activation, as the compiler sees neighbours in them: not clamped;
    which of them exist, and the first and the last of those."""
    i = tl.arange(0, BLOCK_N)
    if SWIGLU:
        half: tl.constexpr = BLOCK_N // 2
        first = tile * half
        inside = first + i % half < N // 2
        return first + i % half + (i // half) * (N // 2), inside, first, N // 2 + tl.minimum(first + half, N // 2) - 1
    else:  # noqa: RET505
        first = tile * BLOCK_N
        return first + i, first + i < N, first, tl.minimum(first + BLOCK_N, N) - 1


@triton.jit
def prefetch_rows(weight, row, start, BYTES_A_ROW: tl.constexpr, ROW_BYTES: tl.constexpr):
    """Asks L2 for BYTES_A_ROW of each row from byte ``start`` of it, no further than the row goes: behind the last one
    there may be no memory (weights: nothing of the kernel before)."""
    lines: tl.constexpr = (BYTES_A_ROW + _LINE - 1) // _LINE
    line = tl.minimum(start + tl.arange(0, lines) * _LINE, ROW_BYTES - 1)
    base = weight.to(tl.pointer_type(tl.int8)) + row.to(tl.int64)[:, None] * ROW_BYTES
    prefetch_l2(base + line[None, :])


@triton.jit
def prefetch_tile(weight, tile, tiles, N, ROW_BYTES: tl.constexpr, BLOCK_N: tl.constexpr, SWIGLU: tl.constexpr):
    """Asks L2 for all of a later tile. While the kernel ahead ends, programs that hold their weights already wait for
    x: memory would be idle."""
    if tile < tiles:
        row = weight_rows(tile, N, BLOCK_N, SWIGLU)
        lines: tl.constexpr = (ROW_BYTES + _LINE - 1) // _LINE
        line = tl.minimum(tl.arange(0, triton.next_power_of_2(lines)), lines - 1) * _LINE
        base = weight.to(tl.pointer_type(tl.int8)) + row.to(tl.int64)[:, None] * ROW_BYTES
        prefetch_l2(base + line[None, :])


@triton.jit
def unpack(words, zero, factor, PART: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Number PART of each 16-bit word of a weight, in DTYPE: of two float8, or of four 4-bit numbers less their zero
    point, times their factor if there is one (both of a shape that broadcasts to the words'). In bfloat16 two words at
    a time, and exact but for the factor; products and differences as fma with -0 and -1, which sm_80 has (mul and sub
    of bf16x2 came with sm_90)."""
    if KIND == FP8:
        return _unpack_fp8(words, PART, DTYPE, INTERPRETED)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return _unpack_int4(words, zero, factor, PART, DTYPE, INTERPRETED)


@triton.jit
def _unpack_fp8(words, PART: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    # The fields of e4m3 moved to where bfloat16 and float32 have them are the number times 2^-120, subnormals included.
    if INTERPRETED or DTYPE != tl.bfloat16:  # noqa: SIM300
        bits = (words.to(tl.int32) >> (8 * PART)) & 255
        return ((((bits & 128) << 24) | ((bits & 127) << 20)).to(tl.float32, bitcast=True) * 2.0**120).to(DTYPE)
    elif PART == 0:  # noqa: RET505
        return tl.inline_asm_elementwise(
            """{ .reg .b32 s, t, z; shl.b32 s, $1, 8; and.b32 s, s, 0x80008000; shl.b32 t, $1, 4;
            lop3.b32 t, t, 0x07f007f0, s, 0xEA; mov.b32 s, 0x7b807b80;
            mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, t, s, z; }""",
            "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 s, t, z; and.b32 s, $1, 0x80008000; shr.u32 t, $1, 4;
            lop3.b32 t, t, 0x07f007f0, s, 0xEA; mov.b32 s, 0x7b807b80;
            mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, t, s, z; }""",
            "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _unpack_int4(words, zero, factor, PART: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    if INTERPRETED or DTYPE != tl.bfloat16:  # noqa: SIM300
        number = ((words >> (4 * PART)) & 15).to(tl.float32) - zero.to(tl.float32)
        if factor is not None:
            number = number * factor.to(tl.float32)
        return number.to(DTYPE)
    else:  # noqa: RET505
        # Or-ing the bits into the mantissa of 128.0 makes 128 + q (Kim et al., arXiv 2211.10017).
        offset = tl.broadcast_to((zero.to(tl.float32) + 128.0).to(tl.bfloat16), words.shape)
        shift = tl.full(words.shape, 4 * PART, tl.int32)
        if factor is None:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 t, m; shr.u32 t, $1, $3; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xEA;
                mov.b32 m, 0xbf80bf80; fma.rn.bf16x2 $0, $2, m, t; }""",
                "=r,r,r,r,r", [words, offset, shift], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:  # noqa: RET505
            return tl.inline_asm_elementwise(
                """{ .reg .b32 t, m, z; shr.u32 t, $1, $4; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xEA;
                mov.b32 m, 0xbf80bf80; mov.b32 z, 0x80008000;
                fma.rn.bf16x2 t, $2, m, t; fma.rn.bf16x2 $0, t, $3, z; }""",
                "=r,r,r,r,r,r", [words, offset, tl.broadcast_to(factor, words.shape), shift],
                dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip


@triton.jit
def unpack_to_float(words, PART: tl.constexpr, INTERPRETED: tl.constexpr):
    """Number PART of the two float8 of each word, in float32."""
    if INTERPRETED:
        return _unpack_fp8(words, PART, tl.float32, True)
    else:  # noqa: RET505
        halves = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", [words], dtype=tl.int32, is_pure=True, pack=1
        )
        return (halves >> (16 * PART)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def squares_ahead(around, m, M, PARTS: tl.constexpr):
    """Loads the sums of squares of rows m, for finish(): [PARTS, rows], not yet added because that would wait."""
    part = tl.arange(0, triton.next_power_of_2(PARTS))[:, None]
    return tl.load(around.squares + part * M + m[None, :], mask=(part < PARTS) & (m < M)[None, :], other=0.0)


@triton.jit
def _finished_columns(tile, N, BLOCK_N: tl.constexpr, SWIGLU: tl.constexpr):
    """Columns of the result that a tile has, and which of them exist."""
    if SWIGLU:
        half: tl.constexpr = BLOCK_N // 2
        column = tile * half + tl.arange(0, half)
        return column, column < N // 2
    else:  # noqa: RET505 (Triton compiles what follows a return)
        # Not weight_rows(): the compiler does not see neighbours in what is clamped, and would store number by number.
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        return column, column < N


@triton.jit
def residual_ahead(around, tile, m, M, N, BLOCK_N: tl.constexpr, SWIGLU: tl.constexpr):
    """Loads the residual, for finish()."""
    column, inside = _finished_columns(tile, N, BLOCK_N, SWIGLU)
    source = around.residual + m.to(tl.int64)[:, None] * around.residual_stride + column[None, :]
    return tl.load(source, mask=(m < M)[:, None] & inside[None, :], other=0.0)


@triton.jit
def add_splits(acc, place, split, tile, partials, counters, SPLITS: tl.constexpr, TOGETHER: tl.constexpr):
    """The sum of a tile's parts, one from each program that shares its K, and whether this program has it: the last one
    to arrive adds them all, always in the same order, so that no float is added atomically.

    Args:
        acc: [any, any], this program's part; ``place`` is where each element lies in a part.
        tile: of all tiles of the launch.
        TOGETHER: parts whose loads are in flight at a time.
    """
    area: tl.constexpr = acc.shape[0] * acc.shape[1]
    base = partials + tile.to(tl.int64) * SPLITS * area
    tl.store(base + split * area + place, acc)
    tl.debug_barrier()
    mine = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if mine:
        acc = tl.zeros_like(acc)
        for s in tl.range(0, SPLITS, num_stages=1, loop_unroll_factor=TOGETHER):
            acc += tl.load(base + s * area + place, cache_modifier=".cg")
        tl.store(counters + tile, 0)
    return acc, mine


@triton.jit
def finish(
    acc,
    squares,
    kept,
    around,
    tile,
    m,
    M,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SWIGLU: tl.constexpr,
    CONV: tl.constexpr,
    residual=None,
):
    """Epilogue of the product acc [BLOCK_M, BLOCK_N], adapters included: the norm's scale (from the sums of squares of
    squares_ahead(); None: no norm), activation, convolution, residual, store; and what the norm that reads the result
    next wants. CONV: the convolution's length, 0 if there is none; ``kept`` is what conv_ahead() loaded,
    ``residual`` what residual_ahead() did, if they were called before."""
    if squares is not None:
        acc = acc * inverse_root(tl.sum(squares, axis=0) / K + around.eps)[:, None]
    if SWIGLU:
        half: tl.constexpr = BLOCK_N // 2
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, half]), [0, 2, 1]))
        acc = silu(gate, around.out.dtype.element_ty) * up
    column, inside = _finished_columns(tile, N, BLOCK_N, SWIGLU)
    keep = (m < M)[:, None] & inside[None, :]
    if CONV > 0:
        if kept is None:
            past = conv_ahead(around.conv, conv_slots(around.conv, m, M), column, inside, m, M, CONV)
        else:
            past = kept
        convolved = conv_step(acc.to(around.out.dtype.element_ty), past, around.conv, CONV)
        acc = tl.where((column < around.conv.channels)[None, :], convolved, acc)
    if around.residual is not None:
        base = residual_ahead(around, tile, m, M, N, BLOCK_N, SWIGLU) if residual is None else residual
        acc += base.to(tl.float32)
    result = acc.to(around.out.dtype.element_ty)
    tl.store(around.out + m.to(tl.int64)[:, None] * around.out_stride + column[None, :], result, mask=keep)
    if around.next_gain is not None:
        exact = tl.where(keep, result.to(tl.float32), 0.0)
        gain = tl.load(around.next_gain + column, mask=inside, other=0.0)
        scaled = (exact * gain[None, :]).to(around.next_values.dtype.element_ty)
        tl.store(around.next_values + m.to(tl.int64)[:, None] * N + column[None, :], scaled, mask=keep)
        tl.store(around.next_squares + tile * M + m, tl.sum(exact * exact, axis=1), mask=m < M)
