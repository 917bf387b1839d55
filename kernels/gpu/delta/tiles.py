"""Tiles of the chunked gated delta rule: what each needs before the state is known. See `gated_delta_chunk`."""

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

from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.delta.step import log_decay
from kernels.gpu.elementary import exponential, exponential_for, inverse_root, sigmoid
from kernels.gpu.segments import TILE, Segments


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
    q_norm = scale * inverse_root(tl.sum(qf * qf, axis=1) + 1e-6)
    distance = t[:, None] ^ t[None, :]
    system = tl.dot(k, tl.trans(k), input_precision="tf32x3")
    k_norm = inverse_root(tl.sum(tl.where(distance == 0, system, 0.0), axis=1) + 1e-6)
    places = factors + head.to(tl.int64) * tokens + row
    count = HEADS * tokens
    grown = exponential(total)
    tl.store(places, beta, mask=inside)
    tl.store(places + count, beta * grown * k_norm, mask=inside)
    tl.store(places + 2 * count, grown * q_norm, mask=inside)
    tl.store(places + 3 * count, exponential(last - total) * k_norm, mask=inside)
    tl.store(places + 4 * count, exponential(last) + 0 * total, mask=inside & (t == 0))

    # Masked before exp: above the diagonal the difference is positive and may overflow.
    between = total[:, None] - total[None, :]
    between = tl.where(t[:, None] >= t[None, :], between, float("-inf"))
    decay = exponential_for(between, k.dtype) * k_norm[None, :]
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
def product(a, x, acc, TERMS: tl.constexpr):
    """``a @ x + acc`` of a float32 x and an a that is exact in its type: x is rounded to that type, or split into two
    terms of it."""
    high = x.to(a.dtype)
    out = tl.dot(a, high, acc, input_precision="tf32x3")
    if TERMS == 2:
        out = tl.dot(a, (x - high.to(tl.float32)).to(a.dtype), out)
    return out


@triton.jit
def written(read, v, system, systems, factor, inside, planes, TILE_TERMS: tl.constexpr):
    """W of a tile, float32: what its tokens really write, given what their keys ``read`` from the state before.

    ``systems``: addresses of the first term, which ``system`` is; ``factor``: those of the rows' β.
    """
    beta = tl.load(factor, mask=inside, other=0.0)
    r = beta[:, None] * v - tl.load(factor + planes, mask=inside, other=0.0)[:, None] * read
    w = product(system, r, r, TILE_TERMS)
    if TILE_TERMS == 2:
        system = tl.load(systems + planes * system.shape[1], mask=inside[:, None], other=0.0)
        w = product(system, r, w, 1)
    return w


@triton.jit
def state_behind(s, k, w, factor, first_factor, inside, planes, TILE_TERMS: tl.constexpr):
    """State behind a tile whose first row has its factors at ``first_factor``."""
    w *= tl.load(factor + 3 * planes, mask=inside, other=0.0)[:, None]
    return product(tl.trans(k), w, s * tl.load(first_factor + 4 * planes), TILE_TERMS)


@triton.jit
def _store_terms(base, places, x, mask, count, TERMS: tl.constexpr):
    """x as a sum of TERMS numbers of the buffer's type, ``count`` elements apart."""
    high = x.to(base.dtype.element_ty)
    tl.store(base + places, high, mask=mask)
    if TERMS == 2:
        tl.store(base + count + places, (x - high.to(tl.float32)).to(base.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Inputs of the scan for all tiles, by the row of the flat batch."""

    factors: Tensor
    """[5, value_heads, T] float32: β; β exp(G)/|k|; exp(G)/|q|, scaled; exp(G_L − G)/|k|; exp(G_L), at a tile's first
    row only."""
    systems: Tensor
    """[terms, value_heads, T, TILE] model dtype: (I + A)⁻¹ − I, row by row."""
    scores: Tensor
    """[terms, value_heads, T, TILE] model dtype: (q̂_t·k̂_s) exp(G_t − G_s), s ≤ t."""


def prepare_tiles(
    mixed: Tensor,
    projected: Tensor,
    negative_a: Tensor,
    dt_bias: Tensor,
    shape: DeltaShape,
    segments: Segments,
    *,
    terms: int,
    inverse_terms: int,
    num_warps: int,
    pdl: bool = False,
) -> Tiles:
    """The first half of gated_delta_prefill(), whose arguments and ChunkConfig these are."""
    tokens, device, heads = mixed.shape[0], mixed.device, shape.value_heads
    matrices = torch.empty(2, terms, heads, tokens, TILE, dtype=mixed.dtype, device=device)
    tiles = Tiles(torch.empty(5, heads, tokens, dtype=torch.float32, device=device), matrices[0], matrices[1])
    _tiles_kernel[(heads, segments.max_tiles)](
        mixed,
        projected,
        negative_a,
        dt_bias,
        segments.begin,
        segments.tile_segment,
        segments.tile_row,
        tiles.factors,
        tiles.systems,
        tiles.scores,
        tokens,
        shape.key_dim**-0.5,
        INVERSE_TERMS=inverse_terms,
        num_warps=num_warps,
        **constants(mixed, projected, shape, terms, pdl),
    )
    return tiles


def constants(mixed: Tensor, projected: Tensor, shape: DeltaShape, terms: int, pdl: bool) -> dict[str, int]:
    """Constants that both kernels are compiled for. With strides among it, a tile's rows are one address and fixed
    offsets."""
    return {
        "KEY_HEADS": shape.key_heads,
        "HEADS": shape.value_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "BLOCK_K": max(16, triton.next_power_of_2(shape.key_dim)),
        "TILE_TERMS": terms,
        "TILE_ROWS": TILE,
        "MIXED_STRIDE": mixed.stride(0),
        "PROJECTED_STRIDE": projected.stride(0),
        "PDL": pdl,
        "launch_pdl": pdl,
    }
