"""The gated delta rule over packed prefill segments, a tile of 64 tokens at a time, with gates and gated norm.

Reference: `kernels.gated_delta.chunk_gated_delta`. With G the running sum of the log decays of a tile, k̂ and q̂ the
normalised keys and queries, and S the state before the tile (UT transform, arXiv 2406.06484, §3; gated, arXiv
2412.06464, §3.3):

    A[t, s] = β_t (k̂_t·k̂_s) exp(G_t − G_s)      for s < t
    W = (I + A)⁻¹ R,  R_t = β_t (v_t − exp(G_t) Sᵀk̂_t)      what each token really writes
    o_t = exp(G_t) Sᵀq̂_t + Σ_{s≤t} (q̂_t·k̂_s) exp(G_t − G_s) W_s
    S ← exp(G_L) S + Σ_t exp(G_L − G_t) k̂_t ⊗ W_t

Everything that does not need S is computed first, all tiles at once (`_tiles_kernel`); then one program for each
segment, head and block of value dimensions walks through the tiles with its part of S in registers (`_scan_kernel`).

Keys and queries stay as they are, exact in bfloat16; their norms are factors of the tokens, applied in float32. What
is rounded for the tensor cores (S, R, W, and the tile's two matrices) can be split into two bfloat16 terms instead.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.delta_shape import DeltaShape
from kernels.gpu.gated_delta_step import log_decay, sigmoid
from kernels.gpu.gated_norm import gated_norm
from kernels.gpu.segments import TILE, Segments

FACTORS = 5
"""Per token and head: β; β exp(G)/|k|; exp(G)/|q| scaled; exp(G_L − G)/|k|; and exp(G_L), at a tile's first token."""


@triton.jit
def _small_product(a, b, TERMS: tl.constexpr):
    """``a @ b`` of float32 matrices with elements within ±1, each as TERMS float16 numbers: 2⁻¹² or 2⁻²² relative."""
    ah = a.to(tl.float16)
    bh = b.to(tl.float16)
    out = tl.dot(ah, bh)
    if TERMS == 2:
        out = tl.dot((a - ah.to(tl.float32)).to(tl.float16), bh, out)
        out = tl.dot(ah, (b - bh.to(tl.float32)).to(tl.float16), out)
    return out


@triton.jit
def _tiles_kernel(
    mixed,
    projected,
    negative_a,
    dt_bias,
    begins,
    tile_segment,
    tile_row,
    factors,
    systems,
    scores,
    tokens,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INVERSE_TERMS: tl.constexpr,
    TILE_TERMS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MIXED_STRIDE: tl.constexpr,
    PROJECTED_STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    key_head = head // (HEADS // KEY_HEADS)
    rate = tl.load(negative_a + head)
    bias = tl.load(dt_bias + head)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    segment = tl.load(tile_segment + tl.program_id(1))
    if segment < 0:
        return
    end = tl.load(begins + segment + 1)
    t = tl.arange(0, TILE_ROWS)
    row = (tl.load(tile_row + tl.program_id(1)) + t).to(tl.int64)
    inside = row < end
    gates = projected + row * PROJECTED_STRIDE + 2 * KEY_HEADS * KEY_DIM + 2 * HEADS * VALUE_DIM + head
    beta = tl.where(inside, sigmoid(tl.load(gates, mask=inside, other=0.0).to(tl.float32)), 0.0)
    a = tl.load(gates + HEADS, mask=inside, other=0.0).to(tl.float32)
    g = tl.where(inside, log_decay(a, rate, bias), 0.0)
    total = tl.cumsum(g, axis=0)
    last = tl.sum(g, axis=0)

    i = tl.arange(0, BLOCK_K)
    mask = inside[:, None] & (i[None, :] < KEY_DIM)
    vectors = mixed + row[:, None] * MIXED_STRIDE + key_head * KEY_DIM + i[None, :]
    q = tl.load(vectors, mask=mask, other=0.0)
    k = tl.load(vectors + KEY_HEADS * KEY_DIM, mask=mask, other=0.0)
    qf = q.to(tl.float32)
    q_norm = scale / tl.sqrt(tl.sum(qf * qf, axis=1) + 1e-6)
    distance = t[:, None] ^ t[None, :]
    system = tl.dot(k, tl.trans(k), input_precision="tf32x3")
    k_norm = 1.0 / tl.sqrt(tl.sum(tl.where(distance == 0, system, 0.0), axis=1) + 1e-6)
    places = factors + head.to(tl.int64) * tokens + row
    count = HEADS * tokens
    grown = tl.exp(total)
    tl.store(places, beta, mask=inside)
    tl.store(places + count, beta * grown * k_norm, mask=inside)
    tl.store(places + 2 * count, grown * q_norm, mask=inside)
    tl.store(places + 3 * count, tl.exp(last - total) * k_norm, mask=inside)
    tl.store(places + 4 * count, tl.exp(last) + 0 * total, mask=inside & (t == 0))

    # Masked before exp: above the diagonal the difference is positive and may overflow.
    between = total[:, None] - total[None, :]
    decay = tl.exp(tl.where(t[:, None] >= t[None, :], between, float("-inf"))) * k_norm[None, :]
    score = tl.dot(q, tl.trans(k), input_precision="tf32x3") * decay * q_norm[:, None]
    matrix = (head.to(tl.int64) * tokens + row[:, None]) * TILE_ROWS + t[None, :]
    _store_terms(scores, matrix, score, inside[:, None], HEADS * TILE_ROWS * tokens, TILE_TERMS)
    system = tl.where(t[:, None] > t[None, :], system * decay * (beta * k_norm)[:, None], 0.0)
    # (I + A)⁻¹ of diagonal blocks of 1, 2, 4, … 64 tokens: [[T, 0], [C, U]]⁻¹ = [[T⁻¹, 0], [−U⁻¹ C T⁻¹, U⁻¹]] with C
    # the part of A between two halves, for all blocks of a size in one product. A product of contractions (I − β k̂k̂ᵀ)
    # times decays stays within ±1, as do all terms here, whatever the keys: powers of A would not.
    identity = tl.where(distance == 0, 1.0, 0.0)
    inverse = identity - tl.where(distance == 1, system, 0.0)
    for level in range(1, 6):
        middle = tl.where((distance >> level) == 1, system, 0.0)
        inverse -= _small_product(_small_product(inverse, middle, INVERSE_TERMS), inverse, INVERSE_TERMS)

    _store_terms(systems, matrix, inverse - identity, inside[:, None], HEADS * TILE_ROWS * tokens, TILE_TERMS)


@triton.jit
def _store_terms(base, places, x, mask, count, TERMS: tl.constexpr):
    """x as a sum of TERMS numbers of the buffer's type, ``count`` elements apart."""
    high = x.to(base.dtype.element_ty)
    tl.store(base + places, high, mask=mask)
    if TERMS == 2:
        tl.store(base + count + places, (x - high.to(tl.float32)).to(base.dtype.element_ty), mask=mask)


@triton.jit
def _product(a, x, acc, TERMS: tl.constexpr):
    """``a @ x + acc`` of a float32 x and an a that is exact in its type: x is rounded to that type, or split into two
    terms of it."""
    high = x.to(a.dtype)
    out = tl.dot(a, high, acc, input_precision="tf32x3")
    if TERMS == 2:
        out = tl.dot(a, (x - high.to(tl.float32)).to(a.dtype), out)
    return out


@triton.jit
def _scan_kernel(
    mixed,
    projected,
    norm_weight,
    factors,
    systems,
    scores,
    state,
    begins,
    starts,
    slots,
    out,
    tokens,
    eps,
    OUT_STRIDE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STATE_TERMS: tl.constexpr,
    TILE_TERMS: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MIXED_STRIDE: tl.constexpr,
    PROJECTED_STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    segment = tl.program_id(2)
    begin = tl.load(begins + segment)
    end = tl.load(begins + segment + 1)
    if begin >= end:
        return
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    t = tl.arange(0, TILE_ROWS)
    slot = tl.load(slots + segment).to(tl.int64)
    places = state + ((slot * HEADS + head) * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
    held = (i[:, None] < KEY_DIM) & (j[None, :] < VALUE_DIM)
    cached = tl.load(starts + segment) > 0
    s = tl.load(places, mask=held & cached, other=0.0).to(tl.float32)
    values = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j[None, :]
    head_rows = head.to(tl.int64) * tokens
    if NORM:
        weight = tl.load(norm_weight + j, mask=j < VALUE_DIM, other=0.0)

    for first in tl.range(begin, end, TILE_ROWS, num_stages=STAGES):
        row = (first + t).to(tl.int64)
        inside = row < end
        key_mask = inside[:, None] & (i[None, :] < KEY_DIM)
        vectors = mixed + row[:, None] * MIXED_STRIDE + key_head * KEY_DIM + i[None, :]
        q = tl.load(vectors, mask=key_mask, other=0.0)
        k = tl.load(vectors + KEY_HEADS * KEY_DIM, mask=key_mask, other=0.0)
        matrix = (head_rows + row[:, None]) * TILE_ROWS + t[None, :]
        system = tl.load(systems + matrix, mask=inside[:, None], other=0.0)
        score = tl.load(scores + matrix, mask=inside[:, None], other=0.0)
        value_mask = inside[:, None] & (j[None, :] < VALUE_DIM)
        v = tl.load(mixed + row[:, None] * MIXED_STRIDE + values, mask=value_mask, other=0.0).to(tl.float32)
        factor = factors + head_rows + row
        beta = tl.load(factor, mask=inside, other=0.0)
        read = tl.load(factor + HEADS * tokens, mask=inside, other=0.0)
        grown = tl.load(factor + 2 * HEADS * tokens, mask=inside, other=0.0)
        late = tl.load(factor + 3 * HEADS * tokens, mask=inside, other=0.0)
        fade = tl.load(factors + 4 * HEADS * tokens + head_rows + first)

        zero = tl.zeros([TILE_ROWS, BLOCK_V], tl.float32)
        r = beta[:, None] * v - read[:, None] * _product(k, s, zero, STATE_TERMS)
        o = grown[:, None] * _product(q, s, zero, STATE_TERMS)
        w = _product(system, r, r, TILE_TERMS)
        if TILE_TERMS == 2:
            more = matrix + HEADS * TILE_ROWS * tokens
            w = _product(tl.load(systems + more, mask=inside[:, None], other=0.0), r, w, 1)
            o = _product(tl.load(scores + more, mask=inside[:, None], other=0.0), w, o, 1)
        o = _product(score, w, o, TILE_TERMS)
        s = _product(tl.trans(k), w * late[:, None], s * fade, TILE_TERMS)

        if NORM:
            z_places = projected + row[:, None] * PROJECTED_STRIDE + HEADS * VALUE_DIM + values
            z = tl.load(z_places, mask=value_mask, other=0.0).to(tl.float32)
            inverse = 1.0 / tl.sqrt(tl.sum(o * o, axis=1) / VALUE_DIM + eps)
            o = o * inverse[:, None] * weight[None, :] * (z * sigmoid(z))
        places_out = out + row[:, None] * OUT_STRIDE + head * VALUE_DIM + j[None, :]
        tl.store(places_out, o.to(out.dtype.element_ty), mask=value_mask)
    tl.store(places, s.to(state.dtype.element_ty), mask=held)


@dataclass(frozen=True, slots=True)
class ChunkConfig:
    """How the work is cut and how exact its products are.

    Raises:
        ValueError: a number of terms other than 1 or 2.
    """

    block_v: int
    """Value dimensions of a scan program; with all of them in one the gated norm needs no kernel of its own."""
    num_warps: int
    num_stages: int
    """Tiles of the scan in flight, the one at work included."""
    state_terms: int = 1
    """bfloat16 terms of the state as an operand: 1 rounds it to 2⁻⁹, 2 to 2⁻¹⁷. The state itself is float32."""
    tile_terms: int = 1
    """The same for what tokens write and for a tile's own matrices."""
    inverse_terms: int = 2
    """float16 terms of the operands of the triangular inverse."""
    tile_warps: int = 4

    def __post_init__(self) -> None:
        if not {self.state_terms, self.tile_terms, self.inverse_terms} <= {1, 2}:
            raise ValueError(f"terms are 1 or 2: {self}")


FEW = ChunkConfig(block_v=32, num_warps=4, num_stages=2)
"""Few long segments: more programs, for the time to the first token."""
MANY = ChunkConfig(block_v=64, num_warps=4, num_stages=2)
"""Segments enough to fill the device."""
EXACT = ChunkConfig(block_v=32, num_warps=4, num_stages=1)
"""float32 models: products are emulated in float32, for tests rather than speed."""
_PROGRAMS = 132
"""Multiprocessors of an H100 or H200."""


def gated_delta_prefill(
    mixed: Tensor,
    projected: Tensor,
    negative_a: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    state: Tensor,
    segments: Segments,
    *,
    out: Tensor | None = None,
    config: ChunkConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """Packed segments: each goes on from its state and leaves its new one in place.

    Args:
        mixed: [T, conv_dim], the convolution's output, query | key | value heads, over the whole flat batch.
        projected: [T, conv_dim + value_size + 2 · value_heads], the mixer's projections: qkv | z | b | a.
        negative_a: [value_heads] float32, −exp(A_log).
        dt_bias: [value_heads] float32.
        norm_weight: [value_dim] float32, plain (not 1 + w).
        eps: of the gated norm.
        state: [num_slots, value_heads, key_dim, value_dim] float32 or bfloat16, contiguous. Read as zeros where a
            segment starts at 0.
        segments: where the sequences lie.
        out: [T, value_size], where to write; rows outside the segments stay as they are.
        config: None chooses by the number of segments that fit into ``segments``.
        pdl: launch before the kernel ahead has finished (programmatic dependent launch).

    Returns:
        [T, value_size] in mixed's dtype: rms_norm(o) · silu(z); rows outside the segments are undefined.

    Raises:
        ValueError: shapes do not fit.
    """
    shape = DeltaShape.of(mixed, projected, state)
    tokens, device = mixed.shape[0], mixed.device
    if out is None:
        out = torch.empty(tokens, shape.value_size, dtype=mixed.dtype, device=device)
    if not segments.max_tiles:
        return out
    if config is None:
        config = _choose(shape, segments, mixed.dtype)
    block_k = max(16, triton.next_power_of_2(shape.key_dim))
    block_v = min(config.block_v, max(16, triton.next_power_of_2(shape.value_dim)))
    blocks = triton.cdiv(shape.value_dim, block_v)
    exact = mixed.dtype == torch.float32
    tile_terms = 1 if exact else config.tile_terms
    factors = torch.empty(FACTORS, shape.value_heads, tokens, dtype=torch.float32, device=device)
    matrices = torch.empty(2, tile_terms, shape.value_heads, tokens, TILE, dtype=mixed.dtype, device=device)
    dims = {
        "KEY_HEADS": shape.key_heads,
        "HEADS": shape.value_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "BLOCK_K": block_k,
        "TILE_TERMS": tile_terms,
        "TILE_ROWS": TILE,
        # Constants: then a tile's rows are one address and fixed offsets from it.
        "MIXED_STRIDE": mixed.stride(0),
        "PROJECTED_STRIDE": projected.stride(0),
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    _tiles_kernel[(shape.value_heads, segments.max_tiles)](
        mixed,
        projected,
        negative_a,
        dt_bias,
        segments.begin,
        segments.tile_segment,
        segments.tile_row,
        factors,
        matrices[0],
        matrices[1],
        tokens,
        shape.key_dim**-0.5,
        INVERSE_TERMS=2 if exact else config.inverse_terms,
        num_warps=config.tile_warps,
        **dims,
    )
    _scan_kernel[(blocks, shape.value_heads, segments.max_segments)](
        mixed,
        projected,
        norm_weight,
        factors,
        matrices[0],
        matrices[1],
        state,
        segments.begin,
        segments.start,
        segments.slot,
        out,
        tokens,
        eps,
        OUT_STRIDE=out.stride(0),
        BLOCK_V=block_v,
        STATE_TERMS=1 if exact else config.state_terms,
        STAGES=config.num_stages,
        NORM=blocks == 1,
        num_warps=config.num_warps,
        **dims,
    )
    if blocks > 1:
        gate = projected[:, shape.conv_dim : shape.conv_dim + shape.value_size]
        gated_norm(out, gate, norm_weight, eps, segments, out=out, pdl=pdl)
    return out


def _choose(shape: DeltaShape, segments: Segments, dtype: torch.dtype) -> ChunkConfig:
    if dtype == torch.float32:
        return EXACT
    return FEW if segments.max_segments * shape.value_heads < _PROGRAMS else MANY
