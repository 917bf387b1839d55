"""Pieces of long chains, whose scans then run side by side: the state that each piece begins with.

A tile's effect on the state is affine, S ← T S + U, and so is that of a piece of tiles one behind the other. Three
passes, of which the last is the scan itself (`kernels.gpu.delta.chunk`), a program for each piece:

1. each piece but the last of its chain: the product T of its tiles, by the recurrence from the unit matrix with values
   of zero, and the state U that it leaves behind a state of zeros (the first piece: behind the chain's own state);
2. for one piece after the other S ← T S + U, in float32;
3. the scan, each piece from its state.

T is a product of decays and contractions (I − β k̂k̂ᵀ), so that nothing grows however long a piece is. Its columns are
rounded where those of a state are, with the same number of terms, and kept in float32 between.
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

from kernels.gpu.delta.chunk_configs import ChunkConfig, PieceConfig
from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.delta.tiles import Tiles, constants, product, state_behind, written
from kernels.gpu.delta.waiting_writes import NONE, WaitingWrites, state_now
from kernels.gpu.segments import TILE, Segments

_SEGMENTS = tl.constexpr(64)
"""Segments whose tiles are counted at a time."""
_JOIN_VALUES, _JOIN_WARPS = 32, 8
"""Value dimensions and warps of a program that joins a chain's pieces."""


@triton.jit
def piece_of(begins, segment, count, piece, segments, piece_tiles, TILE_ROWS: tl.constexpr):
    """Of a chain of ``count`` links from ``segment`` on: how many pieces it is cut into, first tile and end of one of
    them among the chain's tiles, and that piece's place among the states.

    Every piece has ``piece_tiles`` tiles at least, unless it is the only one, which has no place. So the first tiles of
    two pieces are that far apart in the batch, and dividing by it gives each piece a place of its own.
    """
    ahead = 0
    tiles = 0
    for block in tl.range(0, segment + count, _SEGMENTS):
        each = block + tl.arange(0, _SEGMENTS)
        there = each < segments
        rows = tl.load(begins + each + 1, mask=there, other=0) - tl.load(begins + each, mask=there, other=0)
        of_each = (rows + TILE_ROWS - 1) // TILE_ROWS
        ahead += tl.sum(tl.where(each < segment, of_each, 0))
        tiles += tl.sum(tl.where((each >= segment) & (each < segment + count), of_each, 0))
    pieces = tl.maximum(tiles // piece_tiles, 1)
    first = tiles * piece // pieces
    return pieces, first, tiles * (piece + 1) // pieces, ((ahead + first) // piece_tiles).to(tl.int64)


@triton.jit
def rows_of_piece(begin, end, done, first, last, TILE_ROWS: tl.constexpr):
    """Rows of a link that lie in the tiles [first, last) of its chain, ``done`` of which are ahead of the link: begin,
    end, and the tiles that are done behind the link."""
    tiles = (end - begin + TILE_ROWS - 1) // TILE_ROWS
    stop = tl.minimum(end, begin + tl.maximum(last - done, 0) * TILE_ROWS)
    return begin + tl.maximum(first - done, 0) * TILE_ROWS, stop, done + tiles


@triton.jit(do_not_specialize=["segments", "piece_tiles"])
def _ends_kernel(
    mixed,
    factors,
    systems,
    state,
    begins,
    starts,
    slots,
    links,
    waiting,
    joined,
    tokens,
    segments,
    piece_tiles,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VALUE_BLOCKS: tl.constexpr,
    STATE_TERMS: tl.constexpr,
    TILE_TERMS: tl.constexpr,
    STAGES: tl.constexpr,
    ROOM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MIXED_STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    segment = tl.program_id(2) % segments
    piece = tl.program_id(2) // segments
    count = tl.load(links + segment)
    if count == 0:
        return
    pieces, first_tile, last_tile, at = piece_of(begins, segment, count, piece, segments, piece_tiles, TILE_ROWS)
    if piece + 1 >= pieces:
        return
    head = tl.program_id(1)
    block = tl.program_id(0)
    is_state = block < VALUE_BLOCKS
    if (piece == 0) & (block >= VALUE_BLOCKS):
        return
    key_head = head // (HEADS // KEY_HEADS)
    i = tl.arange(0, BLOCK_K)
    t = tl.arange(0, TILE_ROWS)
    j = tl.where(is_state, block, block - VALUE_BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    held = (i[:, None] < KEY_DIM) & (j[None, :] < tl.where(is_state, VALUE_DIM, KEY_DIM))
    columns = tl.where(is_state, j, VALUE_DIM + j)
    head_place = joined + (head * KEY_DIM + i[:, None]) * (VALUE_DIM + KEY_DIM) + columns[None, :]
    size = HEADS * KEY_DIM * (VALUE_DIM + KEY_DIM)

    cached = (piece == 0) & (tl.load(starts + segment) > 0)
    place = tl.load(slots + segment).to(tl.int64) * HEADS + head
    first_value = tl.where(is_state, block * BLOCK_V, 0)
    s = state_now(state, waiting, place, cached, held, i, j, first_value, KEY_DIM, VALUE_DIM, ROOM)
    # The last piece may write to the slot before the scan of the first one has begun.
    tl.store(head_place + at * size, s, mask=held & (piece == 0))
    s = tl.where((i[:, None] == j[None, :]) & (block >= VALUE_BLOCKS), 1.0, s)

    head_rows = head.to(tl.int64) * tokens
    planes = HEADS * tokens
    done = 0
    for link in tl.range(segment, segment + count, num_stages=1):
        begin, end, done = rows_of_piece(
            tl.load(begins + link), tl.load(begins + link + 1), done, first_tile, last_tile, TILE_ROWS
        )
        for first in tl.range(begin, end, TILE_ROWS, num_stages=STAGES):
            row = (first + t).to(tl.int64)
            inside = row < end
            vectors = mixed + row[:, None] * MIXED_STRIDE + KEY_HEADS * KEY_DIM + key_head * KEY_DIM + i[None, :]
            k = tl.load(vectors, mask=inside[:, None] & (i[None, :] < KEY_DIM), other=0.0)
            matrix = systems + (head_rows + row[:, None]) * TILE_ROWS + t[None, :]
            system = tl.load(matrix, mask=inside[:, None], other=0.0)
            factor = factors + head_rows + row
            read = product(k, s, tl.zeros([TILE_ROWS, BLOCK_V], tl.float32), STATE_TERMS)
            values = mixed + row[:, None] * MIXED_STRIDE + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j[None, :]
            v = tl.load(values, mask=inside[:, None] & is_state & (j[None, :] < VALUE_DIM), other=0.0).to(tl.float32)
            w = written(read, v, system, matrix, factor, inside, planes, TILE_TERMS)
            s = state_behind(s, k, w, factor, factors + head_rows + first, inside, planes, TILE_TERMS)
    _, _, _, behind = piece_of(begins, segment, count, piece + 1, segments, piece_tiles, TILE_ROWS)
    tl.store(head_place + behind * size, s, mask=held)


@triton.jit(do_not_specialize=["segments", "piece_tiles"])
def _join_kernel(
    begins,
    links,
    joined,
    segments,
    piece_tiles,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    segment = tl.program_id(2)
    count = tl.load(links + segment)
    if count == 0:
        return
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    held = (i[:, None] < KEY_DIM) & (j[None, :] < VALUE_DIM)
    square = (i[:, None] < KEY_DIM) & (i[None, :] < KEY_DIM)
    pieces, _, _, at = piece_of(begins, segment, count, 1, segments, piece_tiles, TILE_ROWS)
    rows = joined + (tl.program_id(1) * KEY_DIM + i[:, None]) * (VALUE_DIM + KEY_DIM)
    size = HEADS * KEY_DIM * (VALUE_DIM + KEY_DIM)
    s = tl.load(rows + at * size + j[None, :], mask=held & (pieces > 2), other=0.0)
    for piece in tl.range(2, pieces):
        _, _, _, at = piece_of(begins, segment, count, piece, segments, piece_tiles, TILE_ROWS)
        here = rows + at * size
        across = tl.load(here + VALUE_DIM + i[None, :], mask=square, other=0.0)
        s = tl.dot(across, s, tl.load(here + j[None, :], mask=held, other=0.0), input_precision="tf32x3")
        tl.store(here + j[None, :], s, mask=held)


@dataclass(frozen=True, slots=True)
class Joined:
    """States that pieces begin with."""

    states: Tensor
    """[places, value_heads, key_dim, value_dim + key_dim] float32: the state before a piece, and the transition over
    the piece ahead of it, which a chain's first two do not need. Places without a piece are garbage."""
    tiles: int
    """PieceConfig.tiles."""
    most: int
    """Pieces of a chain at most."""


def join_pieces(
    mixed: Tensor,
    projected: Tensor,
    state: Tensor,
    shape: DeltaShape,
    segments: Segments,
    tiles: Tiles,
    config: ChunkConfig,
    waiting: WaitingWrites | None = None,
    *,
    pdl: bool = False,
) -> Joined | None:
    """Passes 1 and 2 of gated_delta_prefill(), whose arguments these are, behind prepare_tiles().

    Returns:
        None: no chain that fits into ``segments`` is cut.
    """
    if config.pieces is None or segments.max_tiles < 2 * config.pieces.tiles:
        return None
    ends = ends_of_pieces(mixed, projected, state, shape, segments, tiles, config, config.pieces, waiting, pdl=pdl)
    join(ends, shape, segments, pdl=pdl)
    return ends


def ends_of_pieces(
    mixed: Tensor,
    projected: Tensor,
    state: Tensor,
    shape: DeltaShape,
    segments: Segments,
    tiles: Tiles,
    config: ChunkConfig,
    pieces: PieceConfig,
    waiting: WaitingWrites | None = None,
    *,
    pdl: bool = False,
) -> Joined:
    """Pass 1: in the place of a state before a piece, but the first two of a chain, what the piece ahead of it leaves
    behind a state of zeros."""
    heads, count, most = shape.value_heads, segments.max_segments, segments.max_tiles // pieces.tiles
    width = shape.value_dim + shape.key_dim
    joined = torch.empty(most, heads, shape.key_dim, width, dtype=torch.float32, device=mixed.device)
    block = min(pieces.block_v, max(16, triton.next_power_of_2(max(shape.key_dim, shape.value_dim))))
    value_blocks = triton.cdiv(shape.value_dim, block)
    common = constants(mixed, projected, shape, tiles.systems.shape[0], pdl)
    del common["PROJECTED_STRIDE"]
    _ends_kernel[(value_blocks + triton.cdiv(shape.key_dim, block), heads, count * (most - 1))](
        mixed,
        tiles.factors,
        tiles.systems,
        state,
        segments.begin,
        segments.start,
        segments.slot,
        segments.links,
        waiting.arguments(state) if waiting else NONE,
        joined,
        mixed.shape[0],
        count,
        pieces.tiles,
        BLOCK_V=block,
        VALUE_BLOCKS=value_blocks,
        STATE_TERMS=1 if mixed.dtype == torch.float32 else config.state_terms,
        STAGES=pieces.num_stages,
        ROOM=waiting.room if waiting else 0,
        num_warps=pieces.num_warps,
        **common,
    )
    return Joined(joined, pieces.tiles, most)


def join(ends: Joined, shape: DeltaShape, segments: Segments, *, pdl: bool = False) -> None:
    """Pass 2, in place."""
    if ends.most > 2:
        _join_kernel[(triton.cdiv(shape.value_dim, _JOIN_VALUES), shape.value_heads, segments.max_segments)](
            segments.begin,
            segments.links,
            ends.states,
            segments.max_segments,
            ends.tiles,
            HEADS=shape.value_heads,
            KEY_DIM=shape.key_dim,
            VALUE_DIM=shape.value_dim,
            BLOCK_K=max(16, triton.next_power_of_2(shape.key_dim)),
            BLOCK_V=_JOIN_VALUES,
            TILE_ROWS=TILE,
            PDL=pdl,
            num_warps=_JOIN_WARPS,
            launch_pdl=pdl,
        )
