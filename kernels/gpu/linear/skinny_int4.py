"""Products of up to 8 rows with an int4 matrix: the "vector" variant of `skinny_linear` for int4.

Decoding costs more than reading here, so it does the least: or-ing a 4-bit number into the mantissa of 128.0 makes
128 + q (Kim et al., arXiv 2211.10017), which multiplies x as it is. Zero points and scales go on the sums of a group:
``Σ (q - z) s x = s (Σ (128 + q) x - (128 + z) Σ x)``, and Σ x comes from the tensor cores as well, as a product with
ones, where the sums are.

Tensor cores multiply with 8 columns at a time. Where x has fewer rows, the columns are rows of several groups: each
group's weights meet all of them, and only the columns that are the group's own are kept. So x is read once in whole
vectors, and what is done to sums is done to those of several groups at once. Weights, scales and zero points are all
asked for before the kernel ahead has ended. Tiles are those of `kernels.gpu.linear.skinny_stream`; the warps of a
program take turns with the groups of K and add up at the end. Reference: `kernels.quantize`.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,var-annotated"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.delta.conv1d import conv_ahead, conv_slots
from kernels.gpu.linear.skinny_parts import (
    GROUP,
    finish,
    residual_ahead,
    row_of,
    squares_ahead,
    tile_columns,
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

MAX_ROWS = 8
"""Columns of the tensor cores' smallest product."""
TILE = 16
"""Rows of it: of the weight, at a time."""
_COLUMNS = tl.constexpr(MAX_ROWS)
_TILE = tl.constexpr(TILE)


@triton.jit
def _numbers(words, PART: tl.constexpr, DTYPE: tl.constexpr, BARE: tl.constexpr):
    """BARE: number PART of the four of each 16-bit word, as _one() has a 1. Else 128 plus it; in float32, where 128
    would only cost digits of the sums, the number itself."""
    if BARE:
        shift = tl.full(words.shape, 8 * (PART // 2), tl.int32)
        mask = tl.full(words.shape, 0x00F000F0 if PART % 2 else 0x000F000F, tl.int32)
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.u32 t, $1, $2; and.b32 $0, t, $4; }",
            "=r,r,r,r,r,r", [words, shift, mask], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:  # noqa: RET505 (Triton compiles what follows a return)
        ahead: tl.constexpr = 0 if DTYPE == tl.float32 else 128  # noqa: SIM300
        return (((words >> (4 * PART)) & 15) + ahead).to(tl.float32).to(DTYPE)


@triton.jit
def _one(PART: tl.constexpr, WARPS: tl.constexpr, DTYPE: tl.constexpr, BARE: tl.constexpr):
    """A left operand of ones for part PART. BARE: bits 0 … 3 or 4 … 7 of a bfloat16, which count by 2^-133 and 2^-129
    (the exponent's lowest bit is the 8th: of subnormal numbers and those above them the spacing is the same)."""
    if BARE:
        bits = tl.full((WARPS, _TILE, 32), 16 if PART % 2 else 1, tl.int16)
        return bits.to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505
        return tl.full((WARPS, _TILE, 32), 1.0, tl.float32).to(DTYPE)


@triton.jit
def _raise(values, PART: tl.constexpr):
    """x times 2^100 or 2^96: with _one() of the part 2^-33. An fma with -0, as in skinny_parts.unpack()."""
    if PART % 2:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, z; mov.b32 t, 0x6f806f80; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, t, z; }",
            "=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:  # noqa: RET505
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t, z; mov.b32 t, 0x71807180; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, t, z; }",
            "=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _load_scale(pointers, INTERPRETED: tl.constexpr):
    """bfloat16 as float32. In assembly, as _load_zero(): the compiler spreads loads that it knows over the threads so
    that memory is read in whole vectors, and brings them where they are wanted through shared memory."""
    if INTERPRETED:
        return tl.load(pointers).to(tl.float32)
    else:  # noqa: RET505
        bits = tl.inline_asm_elementwise(
            "ld.global.u16 $0, [$1];", "=h,l", [pointers], dtype=tl.int16, is_pure=True, pack=1
        )
        return bits.to(tl.bfloat16, bitcast=True).to(tl.float32)


@triton.jit
def _load_zero(pointers, INTERPRETED: tl.constexpr):
    """Loads a zero point as int32."""
    if INTERPRETED:
        return tl.load(pointers).to(tl.int32)
    else:  # noqa: RET505
        return tl.inline_asm_elementwise(
            "ld.global.u8 $0, [$1];", "=r,l", [pointers], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _left(numbers, WARPS: tl.constexpr):
    """[8, WARPS, 2, 32] of the weight as the left operand [WARPS, 16, 32]: as the registers lie (skinny_stream)."""
    left = tl.reshape(numbers, [8, WARPS, 2, 4, 2, 2, 2])
    return tl.reshape(tl.permute(left, [1, 2, 0, 4, 5, 3, 6]), [WARPS, _TILE, 32])


@triton.jit
def _right(values, WARPS: tl.constexpr):
    """[8, WARPS, 1, 32] of x as the right operand [WARPS, 32, 8]."""
    right = tl.reshape(values, [8, WARPS, 4, 2, 2, 2])
    return tl.reshape(tl.permute(right, [1, 3, 4, 2, 5, 0]), [WARPS, 32, _COLUMNS])


@triton.jit
def _add_batch(
    accs,
    held,
    factors,
    zeros,
    rights,
    BATCH: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    BARE: tl.constexpr,
):
    """accs [WARPS, 16, 8] of each piece plus the sums of one batch of turns, whose x is ``rights``, a part each."""
    turns: tl.constexpr = (K // GROUP + WARPS - 1) // WARPS
    pieces: tl.constexpr = len(accs)
    batches: tl.constexpr = len(factors) // pieces
    together: tl.constexpr = _COLUMNS // ROWS
    dtype: tl.constexpr = rights[0].dtype
    place = tl.arange(0, _COLUMNS)
    nothing = tl.zeros((WARPS, _TILE, _COLUMNS), tl.float32)
    total = nothing
    for part in tl.static_range(4):
        total = tl.dot(_one(part, WARPS, dtype, BARE), rights[part], total, input_precision="ieee")
    more = ()
    for piece in tl.static_range(pieces):
        own = nothing
        for turn in tl.static_range(together):
            if BATCH * together + turn < turns:
                words = held[piece * turns + BATCH * together + turn]
                sums = nothing
                for part in tl.static_range(4):
                    left = _left(_numbers(words, part, dtype, BARE), WARPS)
                    sums = tl.dot(left, rights[part], sums, input_precision="ieee")
                own = sums if turn == 0 else tl.where(place // ROWS == turn, sums, own)
        factor, offset = factors[piece * batches + BATCH], zeros[piece * batches + BATCH]
        if BARE:
            factor *= 2.0**33
        if BARE or dtype == tl.float32:
            offset = offset.to(tl.float32)
        else:
            # The float32 whose bits these are is 128 + zero.
            offset = tl.cast(offset * 65536 + 0x43000000, tl.float32, bitcast=True)
        more = more + (accs[piece] + factor * (own - offset * total),)  # noqa: RUF005
    return more


@triton.jit(do_not_specialize=["M"])
def int4_vector_kernel(
    x,
    weight,
    scale,
    zero,
    around,
    lora,
    M,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    SWIGLU: tl.constexpr,
    LORA: tl.constexpr,
    PARTS: tl.constexpr,
    CONV: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program for BLOCK_N rows of the weight, 16 at a time, all of K held in registers, a group a warp and turn; all
    rows of x (ROWS: a power of two that holds them), those of 8 / ROWS turns together."""
    groups: tl.constexpr = K // GROUP
    turns: tl.constexpr = (groups + WARPS - 1) // WARPS
    pieces: tl.constexpr = BLOCK_N // _TILE
    together: tl.constexpr = _COLUMNS // ROWS
    batches: tl.constexpr = (turns + together - 1) // together
    if PDL:
        gdc_launch_dependents()
    m = tl.arange(0, ROWS)
    # What adapters and old inputs are looked up by comes before the weights, as in vector_kernel.
    if lora is not None and ROWS == 1:
        adapter = tl.load(lora.row_adapters)
    if CONV > 0:
        slots = conv_slots(around.conv, m, M)
    eight = tl.arange(0, 8)[:, None, None, None]
    j = tl.arange(0, 32)[None, None, None, :]
    warp = tl.arange(0, WARPS)
    place = tl.arange(0, _COLUMNS)
    # Past the last group there is none: the last again, times an x of zero.
    back = tl.maximum(warp + ((turns - 1) * WARPS - (groups - 1)), 0)
    held = ()
    factors = ()
    zeros = ()
    for piece in tl.static_range(pieces):
        tile = tl.program_id(0) * pieces + piece
        row = row_of(tl.arange(0, 2)[None, None, :, None] * 8 + eight, tile, N, _TILE, SWIGLU)
        words = weight + ((warp.to(tl.int64) * (N * 32))[None, :, None, None] + row * 32 + j)
        for turn in tl.static_range(turns):
            if (turn + 1) * WARPS > groups:
                words -= (back.to(tl.int64) * (N * 32))[None, :, None, None]
            held = held + (tl.load(words + turn * (WARPS * N * 32), eviction_policy="evict_first"),)  # noqa: RUF005
        sums_row = weight_rows(tile, N, _TILE, SWIGLU)
        for batch in tl.static_range(batches):
            group = tl.minimum((place // ROWS + batch * together)[None, :] * WARPS + warp[:, None], groups - 1)
            at = group[:, None, :] * N + sums_row[None, :, None]
            factors = factors + (_load_scale(scale + at, INTERPRETED),)  # noqa: RUF005
            zeros = zeros + (_load_zero(zero + at, INTERPRETED),)  # noqa: RUF005
    # Rows of x for adapters: of the columns only as many as there are rows.
    rows = tl.where(place < ROWS, place, M)
    adapters, windows = (), ()
    if lora is not None or CONV > 0:
        # Or the weights would be asked for when B and old inputs are: after the number of a slot has come.
        tl.debug_barrier()
    for piece in tl.static_range(pieces):
        columns, inside, first, _ = tile_columns(tl.program_id(0) * pieces + piece, N, _TILE, SWIGLU)
        if lora is not None and ROWS == 1:
            adapters = adapters + (adapters_of_row_ahead(lora, adapter, columns, inside, N, LORA),)  # noqa: RUF005
        elif lora is not None:
            adapters = adapters + (adapters_ahead(lora, rows, columns, inside, first, M, N, 0, LORA),)  # noqa: RUF005
        if CONV > 0:
            windows = windows + (conv_ahead(around.conv, slots, columns, inside, m, M, CONV),)  # noqa: RUF005
    if PDL:
        gdc_wait()
    squares = squares_ahead(around, m, M, PARTS) if PARTS > 0 else None
    hiddens, residuals = (), ()
    for piece in tl.static_range(pieces):
        columns, inside, first, _ = tile_columns(tl.program_id(0) * pieces + piece, N, _TILE, SWIGLU)
        if lora is not None and ROWS == 1:
            hiddens = hiddens + (hidden_of_row_ahead(lora, 0, columns, inside, 0, M, LORA),)  # noqa: RUF005
        elif lora is not None:
            hiddens = hiddens + (hidden_ahead(lora, rows, first, M, LORA),)  # noqa: RUF005
    dtype: tl.constexpr = x.dtype.element_ty
    # As subnormal numbers, but not in the interpreter, whose bfloat16 knows no assembly.
    bare: tl.constexpr = dtype == tl.bfloat16 and not INTERPRETED
    accs = ()
    for _ in tl.static_range(pieces):
        accs = accs + (tl.zeros((WARPS, _TILE, _COLUMNS), tl.float32),)  # noqa: RUF005
    for batch in tl.static_range(batches):
        group = (eight // ROWS + batch * together) * WARPS + warp[None, :, None, None]
        source = x + (eight % ROWS).to(tl.int64) * x_stride + (group * GROUP + j)
        live = (eight % ROWS < M) & (group < groups) & (j >= 0)
        rights = ()
        for part in tl.static_range(4):
            value = tl.load(source + part * 32, mask=live, other=0.0)
            rights = rights + (_right(_raise(value, part) if bare else value, WARPS),)  # noqa: RUF005
        if around.residual is not None and batch == batches - 1:
            for piece in tl.static_range(pieces):
                tile = tl.program_id(0) * pieces + piece
                residuals = residuals + (residual_ahead(around, tile, m, M, N, _TILE, SWIGLU),)  # noqa: RUF005
        if batches > 1:  # noqa: SIM114 (known when compiled, the other only when run)
            accs = _add_batch(accs, held, factors, zeros, rights, batch, K, ROWS, WARPS, bare)
        # Always: a branch, because ptxas puts off what it may, and x would be asked for a vector at a time.
        elif M > 0:
            accs = _add_batch(accs, held, factors, zeros, rights, batch, K, ROWS, WARPS, bare)
    for piece in tl.static_range(pieces):
        tile = tl.program_id(0) * pieces + piece
        result = accs[piece]
        if lora is not None and ROWS > 1:
            columns, inside, first, last = tile_columns(tile, N, _TILE, SWIGLU)
            ahead, hidden = adapters[piece], hiddens[piece]
            result = tl.sum(result, axis=0)
            result = add_adapters(result, ahead, hidden, lora, rows, columns, inside, first, last, M, N, LORA)
            result = result[None, :, :]
        result = tl.sum(tl.reshape(result, [result.shape[0], _TILE, together, ROWS]), axis=2)
        result = tl.sum(result, axis=0)
        if lora is not None and ROWS == 1:
            columns, inside, _, _ = tile_columns(tile, N, _TILE, SWIGLU)
            whole = tl.reshape(result, [_TILE])
            whole = add_adapters_to_row(whole, adapters[piece], hiddens[piece], lora, 0, columns, inside, M, N, LORA)
            result = whole[:, None]
        window = windows[piece] if CONV > 0 else None
        residual = residuals[piece] if around.residual is not None else None
        finish(tl.trans(result), squares, window, around, tile, m, M, N, K, _TILE, ROWS, SWIGLU, CONV, residual)
