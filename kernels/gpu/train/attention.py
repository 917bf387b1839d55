"""Causal attention within each packed document and to those that it goes on from, with its output gate.

What the backward reads is kept.

FlashAttention-2's loop (Dao, arXiv 2307.08691): a program has one kv head and some tokens with all query heads of the
group as rows of one product. Reference: `kernels.attention.packed_causal`.
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

from kernels.gpu.elementary import sigmoid_for
from kernels.gpu.launch.device import DeviceLimits, limits_of
from kernels.gpu.segments import TILE
from kernels.gpu.train.documents import Documents

LOG2_E = 1.4426950408889634


@triton.jit
def within(mask, column, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Rows of ``mask`` and columns below DIM; where all columns are, a mask without registers of its own."""
    if DIM == BLOCK_DIM:
        return mask[:, None]
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return mask[:, None] & (column < DIM)[None, :]


@triton.jit
def rows_of(base, row, head, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, mask):
    """[len(row), BLOCK_DIM] of a contiguous [T, HEADS, DIM]."""
    column = tl.arange(0, BLOCK_DIM)
    at = base + (row.to(tl.int64) * HEADS + head)[:, None] * DIM + column[None, :]
    return tl.load(at, mask=within(mask, column, DIM, BLOCK_DIM), other=0.0)


@triton.jit
def values_of(base, row, stride, kv_head, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, mask):
    """[len(row), BLOCK_DIM] of the values, in the projection's last columns."""
    column = tl.arange(0, BLOCK_DIM)
    at = base + row.to(tl.int64)[:, None] * stride + kv_head * DIM + column[None, :]
    return tl.load(at, mask=within(mask, column, DIM, BLOCK_DIM), other=0.0)


@triton.jit
def _read(scores, v, scale, highest, total, acc):
    """Goes on with the softmax and the sum that it weighs, of these scores and values."""
    new = tl.maximum(highest, tl.max(scores, axis=1) * scale)
    weight = tl.exp2(scores * scale - new[:, None])
    correction = tl.exp2(highest - new)
    total = total * correction + tl.sum(weight, axis=1)
    return new, total, tl.dot(weight.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")


@triton.jit
def _forward_kernel(
    rotated,
    gate,
    values,
    begins,
    tile_segment,
    tile_row,
    parents,
    out,
    gated,
    normalizer,
    tiles,
    tokens,
    scale,
    projected_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Last tiles first: within a document they have the most keys, and short programs fill the gaps at the end.
    work = tiles * PARTS - 1 - tl.program_id(0)
    tile = work // PARTS
    kv_head = tl.program_id(1)
    heads: tl.constexpr = KV_HEADS * GROUP
    segment = tl.load(tile_segment + tile)
    if segment < 0:
        return
    begin = tl.load(begins + segment)
    end = tl.load(begins + segment + 1)
    first_row = tl.load(tile_row + tile) + work % PARTS * TOKENS
    if first_row >= end:
        return
    lane = tl.arange(0, TOKENS * BLOCK_GROUP)
    row = first_row + lane // BLOCK_GROUP
    member = lane % BLOCK_GROUP
    real = (row < end) & (member < GROUP)
    head = kv_head * GROUP + member
    queries = rows_of(rotated, row, head, heads + KV_HEADS, DIM, BLOCK_DIM, real)
    highest = tl.full([TOKENS * BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS * BLOCK_GROUP], tl.float32)
    acc = tl.zeros([TOKENS * BLOCK_GROUP, BLOCK_DIM], tl.float32)
    last = tl.minimum(first_row + TOKENS, end)
    # Every row sees the keys up to the first row; the steps beyond need the causal mask.
    unmasked = begin + (first_row + 1 - begin) // BLOCK_KEYS * BLOCK_KEYS
    key_from = begin
    key_to = unmasked
    for masked in tl.static_range(2):
        for first in tl.range(key_from, key_to, BLOCK_KEYS, num_stages=1 if masked else STAGES):
            key = first + tl.arange(0, BLOCK_KEYS)
            there = key < last
            k = rows_of(rotated, key, heads + kv_head, heads + KV_HEADS, DIM, BLOCK_DIM, there)
            v = values_of(values, key, projected_stride, kv_head, DIM, BLOCK_DIM, there)
            scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
            if masked:
                scores = tl.where(key[None, :] <= row[:, None], scores, float("-inf"))
            highest, total, acc = _read(scores, v, scale, highest, total, acc)
        key_from = unmasked
        key_to = last
    if parents is not None:
        above = tl.load(parents + segment)
        while above >= 0:
            key_to = tl.load(begins + above + 1)
            for first in tl.range(tl.load(begins + above), key_to, BLOCK_KEYS, num_stages=STAGES):
                key = first + tl.arange(0, BLOCK_KEYS)
                there = key < key_to
                k = rows_of(rotated, key, heads + kv_head, heads + KV_HEADS, DIM, BLOCK_DIM, there)
                v = values_of(values, key, projected_stride, kv_head, DIM, BLOCK_DIM, there)
                scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
                scores = tl.where(there[None, :], scores, float("-inf"))
                highest, total, acc = _read(scores, v, scale, highest, total, acc)
            above = tl.load(parents + above)
    attended = (acc / total[:, None]).to(out.dtype.element_ty)
    # Addresses kept through the loop do not fit the registers: read again, for the compiler to compute them here.
    row = tl.load(tile_row + tile, volatile=True) + work % PARTS * TOKENS + lane // BLOCK_GROUP
    real = (row < tl.load(begins + segment + 1, volatile=True)) & (member < GROUP)
    column = tl.arange(0, BLOCK_DIM)
    mask = within(real, column, DIM, BLOCK_DIM)
    at = head[:, None] * DIM + column[None, :]
    wide = row.to(tl.int64)[:, None]
    tl.store(out + wide * (heads * DIM) + at, attended, mask=mask)
    tl.store(normalizer + head.to(tl.int64) * tokens + row, highest + tl.log2(total), mask=real)
    g = tl.load(gate + wide * projected_stride + at, mask=mask, other=0.0).to(tl.float32)
    result = attended.to(tl.float32) * sigmoid_for(g, gated.dtype.element_ty)
    tl.store(gated + wide * (heads * DIM) + at, result.to(gated.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class AttentionCut:
    """Tile sizes of a launch."""

    rows: int
    """Tokens times query heads of a group (rounded up to a power of two) of one program or step."""
    keys: int
    """Keys of one step or program."""
    warps: int
    stages: int

    def tokens(self, group: int) -> int:
        """Tokens of a program: a power of two."""
        return min(TILE, max(1, self.rows // (1 << (group - 1).bit_length())))


FORWARD = AttentionCut(rows=128, keys=64, warps=8, stages=2)
_FORWARD_SMALL = AttentionCut(rows=64, keys=32, warps=8, stages=2)
EXACT = AttentionCut(rows=32, keys=16, warps=4, stages=1)


def forward_cut(dtype: torch.dtype, device: DeviceLimits) -> AttentionCut:
    """The cut of attention_forward()."""
    if dtype == torch.float32:
        return EXACT
    return _FORWARD_SMALL if device.size == "small" else FORWARD


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a layer, and the columns of its projection: gate | query | key | value."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def query_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def value_offset(self) -> int:
        """First column of the values."""
        return 2 * self.query_size + self.kv_heads * self.head_dim

    def values(self, projected: Tensor) -> Tensor:
        """[T, kv_heads · head_dim], a view."""
        return projected[:, self.value_offset :]


def attention_forward(
    rotated: Tensor,
    projected: Tensor,
    shape: AttentionShape,
    documents: Documents,
    *,
    cut: AttentionCut | None = None,
    device: DeviceLimits | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``softmax(q kᵀ / √head_dim + causal mask) v`` and that times ``sigmoid(gate)``.

    Args:
        rotated: [T, heads + kv_heads, head_dim] contiguous, of qk_norm_rope().
        projected: [T, width], whose first columns are the gate and whose last are the values; rows contiguous.
        cut: forward_cut() if None.
        device: limits to cut the work up for where no configuration is given; those of the tensors' device if None.

    Returns:
        The attention's output [T, query_size], the gated output [T, query_size], and [heads, T] float32: log₂ of the
        softmax' denominator.
    """
    count = rotated.shape[0]
    # Two tensors: the first is kept for the backward, and would keep the second with it.
    out = torch.empty(count, shape.query_size, dtype=rotated.dtype, device=rotated.device)
    gated = torch.empty_like(out)
    normalizer = torch.empty(shape.heads, count, dtype=torch.float32, device=rotated.device)
    cut = cut or forward_cut(rotated.dtype, device or limits_of(rotated.device))
    tokens = cut.tokens(shape.group)
    _forward_kernel[(documents.tiles * (TILE // tokens), shape.kv_heads)](
        rotated,
        projected,
        shape.values(projected),
        documents.segments.begin,
        documents.segments.tile_segment,
        documents.segments.tile_row,
        None if documents.tree is None else documents.tree.parent,
        out,
        gated,
        normalizer,
        documents.tiles,
        count,
        shape.head_dim**-0.5 * LOG2_E,
        projected.stride(0),
        KV_HEADS=shape.kv_heads,
        GROUP=shape.group,
        DIM=shape.head_dim,
        TOKENS=tokens,
        PARTS=TILE // tokens,
        BLOCK_GROUP=triton.next_power_of_2(shape.group),
        BLOCK_KEYS=cut.keys,
        BLOCK_DIM=max(16, triton.next_power_of_2(shape.head_dim)),
        STAGES=cut.stages,
        num_warps=cut.warps,
    )
    return out, gated, normalizer
