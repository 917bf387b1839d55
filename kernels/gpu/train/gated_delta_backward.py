"""Backward of the gated delta rule over packed documents.

With the names of `kernels.gpu.delta.chunk` (P the scores, M = (I + A)⁻¹, S the state before a tile, S′ behind):

    dW = Pᵀ do + exp(G_L − G) k̂ · dS′        dR = Mᵀ dW
    dS = exp(G_L) dS′ + Σ_t exp(G_t) q̂_t ⊗ do_t − Σ_t β_t exp(G_t) k̂_t ⊗ dR_t

Only this needs the tiles one after another, from the last: one program for each document, head and block of value
dimensions keeps its part of dS in registers (`_scan_kernel`) and writes dR and dS′. Behind the last tile dS′ is the sum
of the first dS of all documents that go on from this one, which come before it here. What they lead to, all tiles at
once, is in `gated_delta_gradients`.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.delta.tiles import Tiles
from kernels.gpu.launch.device import DeviceLimits, limits_of
from kernels.gpu.train.documents import Documents
from kernels.gpu.train.gated_delta import ScanCut, product, scan_constants, scan_launch


@triton.jit
def _scan_kernel(
    mixed,
    factors,
    systems,
    scores,
    grad,
    begins,
    first_tile,
    write_grads,
    state_grads,
    members,
    children,
    places,
    start_grads,
    tokens,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MIXED_STRIDE: tl.constexpr,
):
    segment = tl.program_id(2)
    if members is not None:
        segment = tl.load(members + segment)
    begin = tl.load(begins + segment)
    end = tl.load(begins + segment + 1)
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    t = tl.arange(0, TILE_ROWS)
    held = (i[:, None] < KEY_DIM) & (j[None, :] < VALUE_DIM)
    vectors = mixed + head // (HEADS // KEY_HEADS) * KEY_DIM + i[None, :]
    head_rows = head.to(tl.int64) * tokens
    count = HEADS * tokens
    tiles = (end - begin + TILE_ROWS - 1) // TILE_ROWS
    last_tile = tl.load(first_tile + segment) + tiles - 1
    last_row = begin + (tiles - 1) * TILE_ROWS
    ds = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if members is not None:
        eldest = tl.load(children + segment)
        theirs = start_grads + (eldest.to(tl.int64) * HEADS + head) * KEY_DIM * VALUE_DIM
        theirs = theirs + i[:, None] * VALUE_DIM + j[None, :]
        for _ in tl.range(eldest, tl.load(children + segment + 1), num_stages=1):
            ds += tl.load(theirs, mask=held, other=0.0)
            theirs += HEADS * KEY_DIM * VALUE_DIM
    for back in tl.range(0, tiles, num_stages=STAGES):
        first = last_row - back * TILE_ROWS
        row = (first + t).to(tl.int64)
        inside = row < end
        key_mask = inside[:, None] & (i[None, :] < KEY_DIM)
        value_mask = inside[:, None] & (j[None, :] < VALUE_DIM)
        place = ((last_tile - back).to(tl.int64) * HEADS + head) * KEY_DIM * VALUE_DIM
        behind = state_grads + place + i[:, None] * VALUE_DIM + j[None, :]
        tl.store(behind, ds.to(state_grads.dtype.element_ty), mask=held)
        q = tl.load(vectors + row[:, None] * MIXED_STRIDE, mask=key_mask, other=0.0)
        k = tl.load(vectors + row[:, None] * MIXED_STRIDE + KEY_HEADS * KEY_DIM, mask=key_mask, other=0.0)
        matrix = (head_rows + row[:, None]) * TILE_ROWS + t[None, :]
        system = tl.load(systems + matrix, mask=inside[:, None], other=0.0)
        score = tl.load(scores + matrix, mask=inside[:, None], other=0.0)
        source = row[:, None] * (HEADS * VALUE_DIM) + head * VALUE_DIM + j[None, :]
        do = tl.load(grad + source, mask=value_mask, other=0.0)
        factor = factors + head_rows + row
        dw = product(k, ds, tl.zeros([TILE_ROWS, BLOCK_V], tl.float32))
        dw *= tl.load(factor + 3 * count, mask=inside, other=0.0)[:, None]
        dw = product(tl.trans(score), do, dw)
        dr = product(tl.trans(system), dw, dw)
        tl.store(write_grads + source, dr.to(write_grads.dtype.element_ty), mask=value_mask)
        ds *= tl.load(factors + 4 * count + head_rows + first)
        do = do.to(tl.float32) * tl.load(factor + 2 * count, mask=inside, other=0.0)[:, None]
        ds = product(tl.trans(q), do, ds)
        dr *= tl.load(factor + count, mask=inside, other=0.0)[:, None]
        ds = product(tl.trans(k), -dr, ds)
    if members is not None:
        own = tl.load(places + segment)
        place = (own.to(tl.int64) * HEADS + head) * KEY_DIM * VALUE_DIM
        tl.store(start_grads + place + i[:, None] * VALUE_DIM + j[None, :], ds, mask=held & (own >= 0))


def scan_backward(
    mixed: Tensor,
    projected: Tensor,
    tiles: Tiles,
    grad: Tensor,
    shape: DeltaShape,
    documents: Documents,
    *,
    cut: ScanCut | None = None,
    device: DeviceLimits | None = None,
) -> tuple[Tensor, Tensor]:
    """The half of the backward that goes through the tiles in order.

    Args:
        mixed, projected: the forward's.
        tiles: of the forward.
        grad: [T, value_size] contiguous, do.
        cut: scan_cut() if None.
        device: limits to cut the work up for where no configuration is given; those of the tensors' device if None.

    Returns:
        dR [T, value_size] and dS′ [tiles, value_heads, key_dim, value_dim], in mixed's dtype.
    """
    write_grads = torch.empty_like(grad)
    tree, size = documents.tree, (shape.value_heads, shape.key_dim, shape.value_dim)
    state_grads = torch.empty(documents.tiles, *size, dtype=mixed.dtype, device=mixed.device)
    behind: tuple[Tensor | None, ...] = (None, None, None)
    if tree is not None:
        start_grads = torch.empty(tree.sizes[1], *size, dtype=torch.float32, device=mixed.device)
        behind = (tree.children, tree.place, start_grads)
    for members in (None,) if tree is None else reversed(tree.levels):
        launch = scan_launch(shape, documents, members, mixed.dtype, cut, device or limits_of(mixed.device))
        _scan_kernel[launch.grid](
            mixed,
            tiles.factors,
            tiles.systems,
            tiles.scores,
            grad,
            documents.segments.begin,
            documents.first_tile,
            write_grads,
            state_grads,
            members,
            *behind,
            mixed.shape[0],
            **launch.options,
            **scan_constants(mixed, projected, shape),
        )
    return write_grads, state_grads
