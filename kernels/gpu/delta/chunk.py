"""The gated delta rule over packed prefill segments, a tile of 64 tokens at a time, with gates and gated norm.

Reference: `kernels.gated_delta.chunk_gated_delta`. With G the running sum of the log decays of a tile, k̂ and q̂ the
normalised keys and queries, and S the state before the tile (UT transform, arXiv 2406.06484, §3; gated, arXiv
2412.06464, §3.3):

    A[t, s] = β_t (k̂_t·k̂_s) exp(G_t − G_s)      for s < t
    W = (I + A)⁻¹ R,  R_t = β_t (v_t − exp(G_t) Sᵀk̂_t)      what each token really writes
    o_t = exp(G_t) Sᵀq̂_t + Σ_{s≤t} (q̂_t·k̂_s) exp(G_t − G_s) W_s
    S ← exp(G_L) S + Σ_t exp(G_L − G_t) k̂_t ⊗ W_t

Everything that does not need S is computed first, all tiles at once (`gated_delta_tiles`); then one program for each
chain of segments, head and block of value dimensions walks through the tiles with its part of S in registers
(`_scan_kernel`). A long chain may be cut into pieces that are walked through side by side (`kernels.gpu.delta.pieces`).

Keys and queries stay as they are, exact in bfloat16; their norms are factors of the tokens, applied in float32. What
is rounded for the tensor cores (S, R, W, and the tile's two matrices) can be split into two bfloat16 terms instead.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.delta.chunk_configs import ChunkConfig, chunk_config
from kernels.gpu.delta.gated_norm import gated_norm
from kernels.gpu.delta.pieces import Joined, join_pieces, piece_of, rows_of_piece
from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.delta.tiles import Tiles, constants, prepare_tiles, product, state_behind, written
from kernels.gpu.delta.waiting_writes import NONE, WaitingWrites, none_waits, state_now
from kernels.gpu.elementary import inverse_root, silu
from kernels.gpu.launch.device import DeviceLimits, limits_of
from kernels.gpu.segments import Segments


@triton.jit(do_not_specialize=["segments", "piece_tiles"])
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
    out_slots,
    links,
    waiting,
    joined,
    out,
    tokens,
    segments,
    piece_tiles,
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
    ROOM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MIXED_STRIDE: tl.constexpr,
    PROJECTED_STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    segment = tl.program_id(2)
    piece = 0
    if joined is not None:
        piece = segment // segments
        segment = segment % segments
    count = tl.load(links + segment)
    if count == 0:
        return
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    t = tl.arange(0, TILE_ROWS)
    held = (i[:, None] < KEY_DIM) & (j[None, :] < VALUE_DIM)
    cached = tl.load(starts + segment) > 0
    if joined is not None:
        pieces, first_tile, last_tile, at = piece_of(begins, segment, count, piece, segments, piece_tiles, TILE_ROWS)
        if piece >= pieces:
            return
        cached = cached & (pieces == 1)
    place = tl.load(slots + segment).to(tl.int64) * HEADS + head
    s = state_now(state, waiting, place, cached, held, i, j, tl.program_id(0) * BLOCK_V, KEY_DIM, VALUE_DIM, ROOM)
    if joined is not None:
        before = joined + ((at * HEADS + head) * KEY_DIM + i[:, None]) * (VALUE_DIM + KEY_DIM) + j[None, :]
        s += tl.load(before, mask=held & (pieces > 1), other=0.0)
        done = 0
    values = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j[None, :]
    head_rows = head.to(tl.int64) * tokens
    if NORM:
        weight = tl.load(norm_weight + j, mask=j < VALUE_DIM, other=0.0)

    planes = HEADS * tokens

    for link in tl.range(segment, segment + count, num_stages=1):
        begin = tl.load(begins + link)
        end = tl.load(begins + link + 1)
        complete = True
        if joined is not None:
            begin, end, done = rows_of_piece(begin, end, done, first_tile, last_tile, TILE_ROWS)
            complete = (done > first_tile) & (done <= last_tile)
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
            factor = factors + head_rows + row
            # In the order that keeps the least in registers at a time.
            zero = tl.zeros([TILE_ROWS, BLOCK_V], tl.float32)
            read = product(k, s, zero, STATE_TERMS)
            o = product(q, s, zero, STATE_TERMS)
            value_mask = inside[:, None] & (j[None, :] < VALUE_DIM)
            v = tl.load(mixed + row[:, None] * MIXED_STRIDE + values, mask=value_mask, other=0.0).to(tl.float32)
            w = written(read, v, system, systems + matrix, factor, inside, planes, TILE_TERMS)
            o *= tl.load(factor + 2 * planes, mask=inside, other=0.0)[:, None]
            o = product(score, w, o, TILE_TERMS)
            if TILE_TERMS == 2:
                score = tl.load(scores + matrix + planes * TILE_ROWS, mask=inside[:, None], other=0.0)
                o = product(score, w, o, 1)
            s = state_behind(s, k, w, factor, factors + head_rows + first, inside, planes, TILE_TERMS)

            if NORM:
                z_places = projected + row[:, None] * PROJECTED_STRIDE + HEADS * VALUE_DIM + values
                z = tl.load(z_places, mask=value_mask, other=0.0).to(tl.float32)
                inverse = inverse_root(tl.sum(o * o, axis=1) / VALUE_DIM + eps)
                o = o * inverse[:, None] * weight[None, :] * silu(z, out.dtype.element_ty)
            places_out = out + row[:, None] * OUT_STRIDE + head * VALUE_DIM + j[None, :]
            tl.store(places_out, o.to(out.dtype.element_ty), mask=value_mask)
        if complete:
            # The last link's may take the place of what was read.
            place = tl.load(out_slots + link).to(tl.int64) * HEADS + head
            places = state + (place * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
            tl.store(places, s.to(state.dtype.element_ty), mask=held)
            if ROOM > 0:
                none_waits(waiting, place, head, j, VALUE_DIM, ROOM)


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
    waiting: WaitingWrites | None = None,
    out: Tensor | None = None,
    config: ChunkConfig | None = None,
    device: DeviceLimits | None = None,
    pdl: bool = False,
) -> Tensor:
    """Packed segments: each chain goes on from the state of its slot and leaves those behind its links in their
    out_slots.

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
        waiting: of the same slots: what of the states' past is not in ``state`` yet; nothing waits for those that are
            written.
        out: [T, value_size], where to write; rows outside the segments stay as they are.
        config: chunk_config() if None.
        device: limits to cut the work up for where no configuration is given; those of the tensors' device if None.
        pdl: launch before the kernel ahead has finished (programmatic dependent launch).

    Returns:
        [T, value_size] in mixed's dtype: rms_norm(o) · silu(z); rows outside the segments are undefined.

    Raises:
        ValueError: shapes do not fit.
    """
    shape = DeltaShape.of(mixed, projected, state)
    if out is None:
        out = torch.empty(mixed.shape[0], shape.value_size, dtype=mixed.dtype, device=mixed.device)
    if segments.max_tiles:
        if config is None:
            config = chunk_config(shape, segments, mixed.dtype, device or limits_of(mixed.device))
        exact = mixed.dtype == torch.float32
        tiles = prepare_tiles(
            mixed,
            projected,
            negative_a,
            dt_bias,
            shape,
            segments,
            terms=1 if exact else config.tile_terms,
            inverse_terms=2 if exact else config.inverse_terms,
            num_warps=config.tile_warps,
            pdl=pdl,
        )
        joined = join_pieces(mixed, projected, state, shape, segments, tiles, config, waiting, pdl=pdl)
        normed = scan_tiles(
            mixed, projected, norm_weight, eps, state, shape, segments, tiles, out, config, waiting, joined, pdl=pdl
        )
        if not normed:
            gate = projected[:, shape.conv_dim : shape.conv_dim + shape.value_size]
            gated_norm(out, gate, norm_weight, eps, segments, out=out, pdl=pdl)
    return out


def scan_tiles(
    mixed: Tensor,
    projected: Tensor,
    norm_weight: Tensor,
    eps: float,
    state: Tensor,
    shape: DeltaShape,
    segments: Segments,
    tiles: Tiles,
    out: Tensor,
    config: ChunkConfig,
    waiting: WaitingWrites | None = None,
    joined: Joined | None = None,
    *,
    pdl: bool = False,
) -> bool:
    """The second half: writes ``out`` and the states.

    Args:
        joined: join_pieces() of the same; None: chains are not cut, whatever ``config`` says.

    Returns:
        Whether the gated norm is done: it is if one program has all value dimensions of a head.
    """
    block_v = min(config.block_v, max(16, triton.next_power_of_2(shape.value_dim)))
    blocks = triton.cdiv(shape.value_dim, block_v)
    _scan_kernel[(blocks, shape.value_heads, segments.max_segments * (joined.most if joined else 1))](
        mixed,
        projected,
        norm_weight,
        tiles.factors,
        tiles.systems,
        tiles.scores,
        state,
        segments.begin,
        segments.start,
        segments.slot,
        segments.out_slot,
        segments.links,
        waiting.arguments(state) if waiting else NONE,
        joined.states if joined else None,
        out,
        mixed.shape[0],
        segments.max_segments,
        joined.tiles if joined else 0,
        eps,
        OUT_STRIDE=out.stride(0),
        BLOCK_V=block_v,
        STATE_TERMS=1 if mixed.dtype == torch.float32 else config.state_terms,
        STAGES=config.num_stages,
        NORM=blocks == 1,
        ROOM=waiting.room if waiting else 0,
        num_warps=config.num_warps,
        **constants(mixed, projected, shape, tiles.systems.shape[0], pdl),
    )
    return bool(blocks == 1)
