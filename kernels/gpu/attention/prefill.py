"""Paged causal attention of prefill segments over their prefixes and themselves. Reference:
`kernels.attention.paged_prefill` and the output gate of `services.engine.models.qwen3_5.layers`.

A program has one kv head and some tokens of a tile with all query heads of the group as rows of one product. Keys come
in steps counted from position 0, so the bits of a row do not depend on where its segment was cut.
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

from kernels.gpu.attention import prefill_hopper as hopper
from kernels.gpu.attention.pages import KvPages
from kernels.gpu.launch.device import DeviceLimits, limits_of
from kernels.gpu.segments import TILE, Segments

_LOG2_E = 1.4426950408889634
_HOPPER = (9, 0)
"""Compute capability."""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tile sizes of a launch."""

    block_rows: int
    """Tokens times query heads of a group (rounded up to a power of two) of one program."""
    block_keys: int
    """Keys of one step of the inner loop."""
    warps: int
    stages: int
    """Steps of the inner loop whose pages are on their way at once, the current one included."""
    tail_stages: int
    """Stages, counted likewise, of the last steps, which need the causal mask."""
    overlapped: bool = False
    """True for the kernel of `kernels.gpu.attention.prefill_hopper`, which has its own cut."""


OVERLAPPED = PrefillConfig(hopper.BLOCK_ROWS, hopper.BLOCK_KEYS, hopper.WARPS, 2, 2, overlapped=True)


def prefill_config(kv: KvPages, heads: int, device: DeviceLimits) -> PrefillConfig:
    """The configuration for these pages and so many query heads."""
    if kv.keys.dtype == torch.float32:
        return PrefillConfig(block_rows=32, block_keys=16, warps=4, stages=1, tail_stages=1)
    if device.size == "small":
        # The tile's queries take half of the shared memory: keys pass through what is left one step at a time.
        return PrefillConfig(block_rows=64, block_keys=32, warps=8 if kv.quantized else 4, stages=2, tail_stages=1)
    if kv.quantized:
        # Dequantised pages pass through registers, which leaves none for more keys or for pages ahead in the tail.
        return PrefillConfig(block_rows=128, block_keys=32, warps=8, stages=3, tail_stages=1)
    if overlaps(kv, heads) and device.capability == _HOPPER and not triton.knobs.runtime.interpret:
        return OVERLAPPED
    return PrefillConfig(block_rows=128, block_keys=64, warps=8, stages=2, tail_stages=1)


def overlaps(kv: KvPages, heads: int) -> bool:
    """True if the OVERLAPPED kernel knows such pages and heads."""
    group = heads // kv.kv_heads
    return (kv.keys.dtype, kv.head_dim, kv.block_size) == (torch.bfloat16, hopper.DIM, 16) and group in (2, 4, 8, 16)


@triton.jit
def _blocks(table, first, end, PAGE: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """The table's entries for the keys from ``first`` on; past the end, that of the last key."""
    position = tl.minimum(first + tl.arange(0, BLOCK_KEYS), end - 1)
    return tl.load(table + position // PAGE)


@triton.jit
def _page_rows(
    pages,
    scales,
    block,
    first,
    end,
    kv_head,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """[BLOCK_KEYS, BLOCK_DIM] of the keys from ``first`` on. LAST: some may lie past the end. The last key stands for
    them, because what the pages hold there may be NaN."""
    position = first + tl.arange(0, BLOCK_KEYS)
    if LAST:
        position = tl.minimum(position, end - 1)
    column = tl.arange(0, BLOCK_DIM)
    place = (block.to(tl.int64) * PAGE + position % PAGE) * KV_HEADS + kv_head
    at = pages + place[:, None] * DIM + column[None, :]
    x = tl.load(at, mask=(column < DIM)[None, :], other=0.0) if DIM < BLOCK_DIM else tl.load(at)
    if FP8:
        # float16: the hardware converts e4m3 to it in one step, and normed keys and values fit its range.
        x = x.to(tl.float16) * tl.load(scales + place).to(tl.float16)[:, None]
    return x


@triton.jit
def _softmax_step(scores, first, query_position, scale, highest, total, MASKED: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Weights of raw scores, the new maximum and sum, and the factor of what was added up so far."""
    if MASKED:
        position = first + tl.arange(0, BLOCK_KEYS)
        scores = tl.where(position[None, :] <= query_position[:, None], scores, float("-inf"))
    new = tl.maximum(highest, tl.max(scores, axis=1) * scale)
    weight = tl.exp2(scores * scale - new[:, None])
    correction = tl.exp2(highest - new)
    return weight, new, total * correction + tl.sum(weight, axis=1), correction


# Numbers that change with the step or the settings must not compile another variant.
@triton.jit(
    do_not_specialize=["tiles", "table_stride"],
    do_not_specialize_on_alignment=["segment_begin", "segment_start", "segment_slot", "tile_segment", "tile_row"],
)
def _prefill_kernel(
    q,
    gate,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    segment_begin,
    segment_start,
    segment_slot,
    tile_segment,
    tile_row,
    out,
    tiles,
    scale,
    gate_stride,
    out_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STAGES: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # Padding waits too: the kernel behind relies on all kernels ahead of this one.
        gdc_wait()
        gdc_launch_dependents()
    # Last tiles first: within a segment they have the most keys, and short programs fill the gaps at the end.
    work = tiles * PARTS - 1 - tl.program_id(0)
    tile = work // PARTS
    kv_head = tl.program_id(1)
    segment = tl.load(tile_segment + tile)
    if segment < 0:
        return
    first_row = tl.load(tile_row + tile) + (work % PARTS) * TOKENS
    begin = tl.load(segment_begin + segment)
    last_row = tl.load(segment_begin + segment + 1)
    if first_row >= last_row:
        return
    first_position = tl.load(segment_start + segment) + first_row - begin
    count = tl.minimum(TOKENS, last_row - first_row)
    end = first_position + count
    table = tables + tl.load(segment_slot + segment).to(tl.int64) * table_stride

    lane = tl.arange(0, TOKENS * BLOCK_GROUP)
    token = lane // BLOCK_GROUP
    member = lane % BLOCK_GROUP
    column = tl.arange(0, BLOCK_DIM)
    row = (first_row + token).to(tl.int64)
    head = kv_head * GROUP + member
    wanted = ((token < count) & (member < GROUP))[:, None] & (column < DIM)[None, :]
    queries = tl.load(q + (row * (KV_HEADS * GROUP) + head)[:, None] * DIM + column[None, :], mask=wanted, other=0.0)
    if FP8:
        # See _page_rows(); normed queries fit it too.
        queries = queries.to(tl.float16)
    query_position = first_position + token
    highest = tl.full([TOKENS * BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS * BLOCK_GROUP], tl.float32)
    acc = tl.zeros([TOKENS * BLOCK_GROUP, BLOCK_DIM], tl.float32)
    block = _blocks(table, 0, end, PAGE, BLOCK_KEYS)
    # Every row sees the keys up to the first row's own position; the steps beyond need the causal mask.
    unmasked = (first_position + 1) // BLOCK_KEYS * BLOCK_KEYS
    first_key = 0
    last_key = unmasked
    for masked in tl.static_range(2):
        for first in tl.range(first_key, last_key, BLOCK_KEYS, num_stages=TAIL_STAGES if masked else STAGES):
            k = _page_rows(
                keys, key_scales, block, first, end, kv_head, KV_HEADS, DIM, PAGE, FP8, masked, BLOCK_KEYS, BLOCK_DIM
            )
            v = _page_rows(
                values,
                value_scales,
                block,
                first,
                end,
                kv_head,
                KV_HEADS,
                DIM,
                PAGE,
                FP8,
                masked,
                BLOCK_KEYS,
                BLOCK_DIM,
            )
            # One step ahead, so that the pages' loads do not wait for it.
            block = _blocks(table, first + BLOCK_KEYS, end, PAGE, BLOCK_KEYS)
            scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
            weight, highest, total, correction = _softmax_step(
                scores, first, query_position, scale, highest, total, masked, BLOCK_KEYS
            )
            acc = tl.dot(weight.to(queries.dtype), v, acc * correction[:, None], input_precision="ieee")
        first_key = unmasked
        last_key = end
    # Rounded before the gate, as in the reference: two float32 tiles at once do not fit the registers. Nor do addresses
    # kept through the loop: the rows are read again, for the compiler to compute them here.
    attended = (acc / total[:, None]).to(out.dtype.element_ty)
    again = (tl.load(tile_row + tile, volatile=True) + (work % PARTS) * TOKENS).to(tl.int64)
    left = tl.load(segment_begin + segment + 1, volatile=True) - again.to(tl.int32)
    wanted = ((token < left) & (member < GROUP))[:, None] & (column < DIM)[None, :]
    at = head[:, None] * DIM + column[None, :]
    g = tl.load(gate + again * gate_stride + (token[:, None] * gate_stride + at), mask=wanted, other=0.0)
    result = attended.to(tl.float32) / (1.0 + tl.exp(-g.to(tl.float32)))
    target = out + again * out_stride + (token[:, None] * out_stride + at)
    tl.store(target, result.to(out.dtype.element_ty), mask=wanted)


def paged_prefill(
    q: Tensor,
    projected: Tensor,
    kv: KvPages,
    tables: Tensor,
    segments: Segments,
    *,
    out: Tensor | None = None,
    config: PrefillConfig | None = None,
    device: DeviceLimits | None = None,
    pdl: bool = False,
) -> Tensor:
    """``softmax(q kᵀ / √head_dim + causal mask) v · sigmoid(gate)`` for the rows of the segments.

    FlashAttention-2's loop (Dao, arXiv 2307.08691) over pages (Kwon et al., PagedAttention, arXiv 2309.06180).

    Args:
        q: [T, heads, head_dim] bf16 or float32, contiguous.
        projected: [T, width]; its first heads · head_dim columns are the output gate.
        kv: pages that already hold the segments' own positions.
        tables: [num_slots, max_blocks] int32.
        segments: where the sequences lie in the T rows.
        out: [T, heads · head_dim], where to write the result.
        config: prefill_config() if None.
        device: limits to cut the work up for where no configuration is given; those of the tensors' device if None.
        pdl: launch before the kernel ahead has finished (programmatic dependent launch).

    Returns:
        [T, heads · head_dim] in q's dtype; rows of no segment are left as they are.

    Raises:
        ValueError: shapes do not fit.
    """
    rows, heads, dim = q.shape
    if heads % kv.kv_heads or dim != kv.head_dim or not q.is_contiguous() or projected.stride(1) != 1:
        raise ValueError(f"paged_prefill: q {tuple(q.shape)} must be contiguous and fit pages {tuple(kv.keys.shape)}")
    if projected.shape[0] != rows or projected.shape[1] < heads * dim:
        raise ValueError(f"paged_prefill: projected {tuple(projected.shape)} has no gate for q {tuple(q.shape)}")
    if out is None:
        out = torch.empty(rows, heads * dim, dtype=q.dtype, device=q.device)
    chosen = config or prefill_config(kv, heads, device or limits_of(q.device))
    if segments.max_tiles == 0:
        return out
    group = heads // kv.kv_heads
    block_group = triton.next_power_of_2(group)
    tokens = min(TILE, max(1, chosen.block_rows // block_group))
    parts = TILE // tokens
    grid = (segments.max_tiles * parts, kv.kv_heads)
    where = (tables, segments.begin, segments.start, segments.slot, segments.tile_segment, segments.tile_row)
    numbers = (segments.max_tiles, dim**-0.5 * _LOG2_E, projected.stride(0), out.stride(0), tables.stride(0))
    shape = {"KV_HEADS": kv.kv_heads, "GROUP": group, "DIM": dim, "PAGE": kv.block_size}
    shape |= {"TOKENS": tokens, "PARTS": parts}
    launch = {"PDL": pdl, "num_warps": chosen.warps, "launch_pdl": pdl}
    if chosen.overlapped:
        if not overlaps(kv, heads):
            raise ValueError(f"paged_prefill: no overlapped kernel for {heads} heads and pages {tuple(kv.keys.shape)}")
        hopper.prefill_kernel[grid](
            q, projected, kv.keys, kv.values, *where, out, *numbers, **shape, KEYS=chosen.block_keys, **launch
        )
        return out
    _prefill_kernel[grid](
        q,
        projected,
        kv.keys,
        kv.values,
        kv.keys if kv.key_scales is None else kv.key_scales,
        kv.values if kv.value_scales is None else kv.value_scales,
        *where,
        out,
        *numbers,
        **shape,
        FP8=kv.quantized,
        BLOCK_GROUP=block_group,
        BLOCK_KEYS=chosen.block_keys,
        BLOCK_DIM=max(16, triton.next_power_of_2(dim)),
        STAGES=chosen.stages,
        TAIL_STAGES=chosen.tail_stages,
        **launch,
    )
    return out
