"""The gated delta rule over packed documents, keeping what its backward reads.

The same two halves as in serving (`kernels.gpu.delta.chunk` has the formulas and the names): the tiles' matrices
from `gated_delta_tiles`, then a scan, which here also writes what every token wrote (W) and the state before each tile.
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

from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.delta.tiles import Tiles, constants, prepare_tiles
from kernels.gpu.launch.device import DeviceLimits, limits_of
from kernels.gpu.segments import TILE
from kernels.gpu.train.documents import Documents


@triton.jit
def product(a, x, acc):
    """``a @ x + acc`` in float32; x is rounded to a's type."""
    return tl.dot(a, x.to(a.dtype), acc, input_precision="tf32x3")


@triton.jit
def _forward_kernel(
    mixed,
    factors,
    systems,
    scores,
    begins,
    first_tile,
    out,
    writes,
    states,
    members,
    parents,
    kept,
    ends,
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
    tile = tl.load(first_tile + segment)
    head = tl.program_id(1)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    t = tl.arange(0, TILE_ROWS)
    held = (i[:, None] < KEY_DIM) & (j[None, :] < VALUE_DIM)
    vectors = mixed + head // (HEADS // KEY_HEADS) * KEY_DIM + i[None, :]
    values = mixed + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j[None, :]
    head_rows = head.to(tl.int64) * tokens
    count = HEADS * tokens
    s = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if members is not None:
        whole = i[:, None] * VALUE_DIM + j[None, :]
        parent = tl.load(parents + segment)
        before = tl.load(kept + parent, mask=parent >= 0, other=0).to(tl.int64) * HEADS + head
        s = tl.load(ends + before * KEY_DIM * VALUE_DIM + whole, mask=held & (parent >= 0), other=0.0)
    for first in tl.range(begin, end, TILE_ROWS, num_stages=STAGES):
        row = (first + t).to(tl.int64)
        inside = row < end
        key_mask = inside[:, None] & (i[None, :] < KEY_DIM)
        value_mask = inside[:, None] & (j[None, :] < VALUE_DIM)
        place = ((tile + (first - begin) // TILE_ROWS).to(tl.int64) * HEADS + head) * KEY_DIM * VALUE_DIM
        tl.store(states + place + i[:, None] * VALUE_DIM + j[None, :], s.to(states.dtype.element_ty), mask=held)
        q = tl.load(vectors + row[:, None] * MIXED_STRIDE, mask=key_mask, other=0.0)
        k = tl.load(vectors + row[:, None] * MIXED_STRIDE + KEY_HEADS * KEY_DIM, mask=key_mask, other=0.0)
        matrix = (head_rows + row[:, None]) * TILE_ROWS + t[None, :]
        system = tl.load(systems + matrix, mask=inside[:, None], other=0.0)
        score = tl.load(scores + matrix, mask=inside[:, None], other=0.0)
        factor = factors + head_rows + row
        zero = tl.zeros([TILE_ROWS, BLOCK_V], tl.float32)
        read = product(k, s, zero)
        o = product(q, s, zero)
        v = tl.load(values + row[:, None] * MIXED_STRIDE, mask=value_mask, other=0.0).to(tl.float32)
        beta = tl.load(factor, mask=inside, other=0.0)
        r = beta[:, None] * v - tl.load(factor + count, mask=inside, other=0.0)[:, None] * read
        w = product(system, r, r)
        o *= tl.load(factor + 2 * count, mask=inside, other=0.0)[:, None]
        o = product(score, w, o)
        target = row[:, None] * (HEADS * VALUE_DIM) + head * VALUE_DIM + j[None, :]
        tl.store(out + target, o.to(out.dtype.element_ty), mask=value_mask)
        tl.store(writes + target, w.to(writes.dtype.element_ty), mask=value_mask)
        w *= tl.load(factor + 3 * count, mask=inside, other=0.0)[:, None]
        s = product(tl.trans(k), w, s * tl.load(factors + 4 * count + head_rows + first))
    if members is not None:
        behind = tl.load(kept + segment)
        place = (behind.to(tl.int64) * HEADS + head) * KEY_DIM * VALUE_DIM
        tl.store(ends + place + i[:, None] * VALUE_DIM + j[None, :], s, mask=held & (behind >= 0))


@dataclass(frozen=True, slots=True)
class ScanCut:
    """Tile sizes of a scan."""

    block_v: int
    """Value dimensions of a program."""
    num_warps: int
    num_stages: int
    """Tiles in flight, the one at work included."""


FEW = ScanCut(block_v=32, num_warps=4, num_stages=3)
MANY = ScanCut(block_v=64, num_warps=4, num_stages=3)
_SMALL = ScanCut(block_v=32, num_warps=4, num_stages=2)
"""For any number of documents in 99 KiB of shared memory."""
_LARGE = ScanCut(block_v=32, num_warps=8, num_stages=3)
"""For any number of documents on sm_80: its tensor cores take what they multiply from registers, of which 4 warps have
too few (the backward spilled up to 6,560 bytes a thread)."""
EXACT = ScanCut(block_v=16, num_warps=4, num_stages=1)
_PROGRAMS = 192
"""Programs of 32 value dimensions each that an H200 runs at once with room to spare, as in serving."""


def scan_cut(shape: DeltaShape, documents: int, dtype: torch.dtype, device: DeviceLimits) -> ScanCut:
    """The cut for so many documents at once."""
    if dtype == torch.float32:
        return EXACT
    if device.size != "wide":
        return _SMALL if device.size == "small" else _LARGE
    few = triton.cdiv(shape.value_dim, FEW.block_v) * shape.value_heads * documents
    return FEW if few <= device.wave(_PROGRAMS) else MANY


@dataclass(frozen=True, slots=True)
class DeltaTrace:
    """Results of a forward that the backward reads, beside its tiles."""

    writes: Tensor
    """[T, value_size]: W, what each token really wrote."""
    states: Tensor
    """[tiles, value_heads, key_dim, value_dim]: the state before each tile."""


def gated_delta_forward(
    mixed: Tensor,
    projected: Tensor,
    negative_a: Tensor,
    dt_bias: Tensor,
    shape: DeltaShape,
    documents: Documents,
    *,
    cut: ScanCut | None = None,
    device: DeviceLimits | None = None,
) -> tuple[Tensor, Tiles, DeltaTrace]:
    """The recurrence from a state of zeros at each document, or from the last state of what it goes on from.

    Args:
        mixed: [T, conv_dim], the convolution's output: query | key | value. Rows contiguous.
        projected: [T, width], the mixer's projection, whose last columns are b | a.
        negative_a, dt_bias: [value_heads] float32.
        cut: scan_cut() if None.
        device: limits to cut the work up for where no configuration is given; those of the tensors' device if None.

    Returns:
        o [T, value_size] in mixed's dtype, before the gated norm, the tiles, and what else the backward reads.
    """
    tokens, dtype = mixed.shape[0], mixed.dtype
    exact = dtype == torch.float32
    tiles = prepare_tiles(
        mixed,
        projected,
        negative_a,
        dt_bias,
        shape,
        documents.segments,
        terms=1,
        inverse_terms=2 if exact else 1,
        num_warps=4,
    )
    out, writes = torch.empty(2, tokens, shape.value_size, dtype=dtype, device=mixed.device)
    tree, size = documents.tree, (shape.value_heads, shape.key_dim, shape.value_dim)
    states = torch.empty(documents.tiles, *size, dtype=dtype, device=mixed.device)
    behind: tuple[Tensor | None, ...] = (None, None, None)
    if tree is not None:
        ends = torch.empty(tree.sizes[0], *size, dtype=torch.float32, device=mixed.device)
        behind = (tree.parent, tree.kept, ends)
    for members in (None,) if tree is None else tree.levels:
        launch = scan_launch(shape, documents, members, dtype, cut, device or limits_of(mixed.device))
        _forward_kernel[launch.grid](
            mixed,
            tiles.factors,
            tiles.systems,
            tiles.scores,
            documents.segments.begin,
            documents.first_tile,
            out,
            writes,
            states,
            members,
            *behind,
            tokens,
            **launch.options,
            **scan_constants(mixed, projected, shape),
        )
    return out, tiles, DeltaTrace(writes, states)


@dataclass(frozen=True, slots=True)
class ScanLaunch:
    """Launch of a scan over some documents."""

    grid: tuple[int, int, int]
    options: dict[str, int]


def scan_launch(
    shape: DeltaShape,
    documents: Documents,
    members: Tensor | None,
    dtype: torch.dtype,
    cut: ScanCut | None,
    device: DeviceLimits,
) -> ScanLaunch:
    """The launch for these documents, for all if ``members`` is None; with the cut for so many if ``cut`` is None."""
    count = documents.count if members is None else len(members)
    cut = cut or scan_cut(shape, count, dtype, device)
    block_v = min(cut.block_v, max(16, triton.next_power_of_2(shape.value_dim)))
    options = {"BLOCK_V": block_v, "STAGES": cut.num_stages, "num_warps": cut.num_warps}
    return ScanLaunch((triton.cdiv(shape.value_dim, block_v), shape.value_heads, count), options)


def scan_constants(mixed: Tensor, projected: Tensor, shape: DeltaShape) -> dict[str, int]:
    """Constants that the scans are compiled for."""
    names = ("KEY_HEADS", "HEADS", "KEY_DIM", "VALUE_DIM", "BLOCK_K", "MIXED_STRIDE")
    known = constants(mixed, projected, shape, 1, False)
    return {name: known[name] for name in names} | {"TILE_ROWS": TILE}
