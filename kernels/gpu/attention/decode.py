"""Paged attention of one new position a sequence, split over the context. Reference: `kernels.attention.paged_decode`
and the output gate of `services.engine.models.qwen3_5.layers`.

The grid is fixed by the launch: (kv head, row, split). How many of a row's splits work follows from its context on the
device; the others end at once. A row with one split writes its output directly. Otherwise each split leaves its
unnormalised output, maximum and sum in the workspace, and the split that finishes last merges them in split order, so
the result does not depend on which one that was.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.attention.pages import KvPages
from kernels.gpu.launch.device import DeviceLimits, limits_of
from kernels.gpu.launch.programmatic import prefetch_l2

_LOG2_E = 1.4426950408889634
_DOT_ROWS = 16
"""Least rows of a tensor core product."""
MAX_SPLITS = 64
"""Most splits of a row."""
_USUAL_MAX_SPLITS = 32
_MERGED = 64
"""Most outputs of a head that are merged at once, splits times heads of a group: twice as many spill registers."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tile sizes and splits of a launch. A row of c keys gets ``min(splits, c / min_keys)`` splits, rounded up, and if
    those had more than max_keys each as many times ``splits`` as it takes; but never more than are launched."""

    block_keys: int
    """Keys of one step of the inner loop."""
    warps: int
    stages: int
    """Steps of the inner loop whose pages are on their way at once, the current one included."""
    splits: int
    """Enough to reach every multiprocessor when all rows are alike. Also the unit of more: some splits more than fit at
    once would have all others wait for them."""
    min_keys: int = 64
    max_keys: int = 8192
    """Most keys of a split, so that one long row among many does not keep the others waiting."""
    merge: int = 8
    """Splits merged at once; more take registers, and with them programs from a multiprocessor."""


def decode_config(kv: KvPages, batch: int, device: DeviceLimits) -> DecodeConfig:
    """The configuration for these pages and this many rows, from whole steps on an H200 that were replayed in turn (as
    `benchmarks.tuning.step.tune --attention-only --context` does); what is fastest alone often is not there. Other
    devices get as many splits as their multiprocessors take, and pages in flight as their shared memory holds."""
    chosen = _roomy(kv, batch, device)
    if device.size == "wide" or kv.keys.dtype == torch.float32:
        return chosen
    return replace(chosen, block_keys=min(chosen.block_keys, _most_keys(kv, device)), stages=min(chosen.stages, 3))


def _most_keys(kv: KvPages, device: DeviceLimits) -> int:
    """Keys of a step whose pages fit shared memory twice, beside those of the step at work."""
    if device.size == "large" or kv.quantized:
        return 64
    return 32


def _roomy(kv: KvPages, batch: int, device: DeviceLimits) -> DecodeConfig:
    programs = batch * kv.kv_heads
    # What follows speaks of 132 multiprocessors.
    few, some, many = device.wave(128), device.wave(256), device.wave(512)
    if kv.keys.dtype == torch.float32:
        return DecodeConfig(block_keys=16, warps=4, stages=1, splits=8)
    if programs < (few // 16 if kv.quantized else few // 8):
        # One program a multiprocessor; large steps, because the latency of each is what counts.
        stages = 4 if kv.quantized else 3
        return DecodeConfig(block_keys=64, warps=4, stages=stages, splits=max(1, few // programs), merge=16)
    if kv.quantized:
        # Bound by conversions: the more warps the better, of 8 rows 145 µs a step behind 4,200 tokens.
        if programs < few // 2:
            return DecodeConfig(block_keys=64, warps=4, stages=3, splits=max(1, some // programs), merge=16)
        stages, splits = (4, some // programs) if programs < few else (3, many // programs)
        return DecodeConfig(block_keys=64, warps=4, stages=stages, splits=max(1, splits), min_keys=128)
    if programs < few // 2:
        # Two programs a multiprocessor: of 8 rows inside a step 37 µs less behind 4,200 tokens, 199 behind 20,000.
        return DecodeConfig(block_keys=32, warps=4, stages=3, splits=max(1, some // programs), merge=16)
    if programs < few:
        # One program a multiprocessor is faster inside a step of 16 rows, if not alone: 12 µs behind 600 tokens.
        return DecodeConfig(block_keys=64, warps=4, stages=3, splits=max(1, few // programs), min_keys=128)
    # Four stages, so that two programs fit a multiprocessor, not three: a third one would be served first and leave
    # the others' rest to few.
    return DecodeConfig(block_keys=32, warps=4, stages=4, splits=max(1, some // programs), min_keys=128)


def decode_splits(batch: int, kv_heads: int, device: DeviceLimits) -> int:
    """Splits to launch for this many rows: more than decode_config() uses for most, because one row may be long, but
    few enough that those without work end unnoticed."""
    return max(4, min(_USUAL_MAX_SPLITS, 8 * device.multiprocessors // (batch * kv_heads)))


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Partial results between the splits of a row. One serves all layers, since launches on a stream follow each
    other; allocate it once, outside graph capture."""

    partial: Tensor
    """[rows, kv_heads, splits, group, head_dim] float32: unnormalised outputs."""
    statistics: Tensor
    """[rows, kv_heads, splits, group, 2] float32: maximum (in powers of two) and sum."""
    arrived: Tensor
    """[rows, kv_heads] int32, zero between launches."""

    @classmethod
    def allocate(
        cls, rows: int, heads: int, kv_heads: int, splits: int, head_dim: int, device: torch.device | str
    ) -> DecodeWorkspace:
        shape = (rows, kv_heads, splits, heads // kv_heads)
        return cls(
            partial=torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
            statistics=torch.empty(*shape, 2, dtype=torch.float32, device=device),
            arrived=torch.zeros(rows, kv_heads, dtype=torch.int32, device=device),
        )


@triton.jit
def _load(at, columns, MASKED: tl.constexpr):
    """A tile of pages; MASKED: some columns stand past the head's end."""
    return tl.load(at, mask=columns[None, :], other=0) if MASKED else tl.load(at)


@triton.jit
def _from_pairs(pairs):
    """Lower and upper bytes of 16-bit integers, which are e4m3 numbers, as float16."""
    lower = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    upper = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return lower.to(tl.float16), upper.to(tl.float16)


@triton.jit
def _places(row, first_head, member, stride, DIM, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """[members, 1]: where the columns of each member begin, in rows of ``stride``. Members are the heads of a group in
    one row after the other."""
    if ROWS == 1:
        return (row * stride + (first_head + member) * DIM)[:, None]
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return ((row + member // GROUP) * stride + (first_head + member % GROUP) * DIM)[:, None]


@triton.jit
def _store(acc, out, gate, out_places, gate_places, column, inside):
    """Gates acc [members, columns] and writes it."""
    g = tl.load(gate + gate_places + column[None, :], mask=inside, other=0.0).to(tl.float32)
    result = acc / (1.0 + tl.exp(-g))
    tl.store(out + out_places + column[None, :], result.to(out.dtype.element_ty), mask=inside)


# Numbers that change with the step or the settings must not compile another variant.
@triton.jit(
    do_not_specialize=["table_stride", "num_splits", "usual_splits", "min_keys", "max_keys"],
    do_not_specialize_on_alignment=["slots", "positions"],
)
def _decode_kernel(
    q,
    gate,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    slots,
    positions,
    out,
    partial,
    statistics,
    arrived,
    scale,
    gate_stride,
    out_stride,
    table_stride,
    num_splits,
    usual_splits,
    min_keys,
    max_keys,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MERGE_STEP: tl.constexpr,
    MERGE_GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64) * ROWS
    split = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    context = tl.load(positions + row) + 1
    for other in tl.static_range(1, ROWS):
        context = tl.maximum(context, tl.load(positions + row + other) + 1)
    slot = tl.load(slots + row).to(tl.int64)
    # Equal shares in whole steps.
    times = tl.cdiv(tl.cdiv(context, max_keys), usual_splits)
    wanted_splits = tl.where(times > 1, times * usual_splits, tl.minimum(usual_splits, tl.cdiv(context, min_keys)))
    wanted_splits = tl.minimum(wanted_splits, num_splits)
    share = tl.cdiv(tl.cdiv(context, wanted_splits), BLOCK_KEYS) * BLOCK_KEYS
    begin = split * share
    if begin >= context:
        return
    end = tl.minimum(begin + share, context)
    table = tables + slot * table_stride

    member = tl.arange(0, BLOCK_GROUP)
    column = tl.arange(0, BLOCK_DIM)
    lane = tl.arange(0, BLOCK_KEYS)
    real = column < DIM
    # Past the end the last key is read again, so that no load needs a mask; its weight there is zero. The table's
    # entries are read one step ahead, so that the pages' loads do not wait for them.
    block = tl.load(table + tl.minimum(begin + lane, end - 1) // PAGE)
    if PDL:
        # Only the newest position is written by a kernel ahead, and L2 sees that write.
        place = (block.to(tl.int64) * PAGE + tl.minimum(begin + lane, end - 1) % PAGE) * KV_HEADS + kv_head
        # Of 2 bytes also in FP8, whose pages come as pairs.
        width: tl.constexpr = DIM // 2 if FP8 else DIM
        line = tl.minimum(tl.arange(0, max(1, BLOCK_DIM // 64)) * 64, width - 1)
        prefetch_l2(keys + place[:, None] * width + line[None, :])
        prefetch_l2(values + place[:, None] * width + line[None, :])
        gdc_wait()
    wanted = (member < ROWS * GROUP)[:, None] & real[None, :]
    first_head = kv_head * GROUP
    query = q + _places(row, first_head, member, KV_HEADS * GROUP * DIM, DIM, GROUP, ROWS)
    if ROWS > 1:
        limit = tl.load(positions + row + member // GROUP, mask=member < ROWS * GROUP, other=0) + 1
        limit = tl.minimum(limit, end)[:, None]
    else:
        limit = end
    if FP8:
        # Pages are read as pairs of e4m3 numbers: two bytes are what tensor core operands are moved in. Dimensions of
        # even and odd number are apart in all products. Normed queries fit float16, to which e4m3 converts in one step.
        pair_column = tl.arange(0, BLOCK_DIM // 2)
        real_pair = pair_column < DIM // 2
        wanted_pair = (member < ROWS * GROUP)[:, None] & real_pair[None, :]
        even_queries = tl.load(query + 2 * pair_column[None, :], mask=wanted_pair, other=0.0).to(tl.float16)
        odd_queries = tl.load(query + 2 * pair_column[None, :] + 1, mask=wanted_pair, other=0.0).to(tl.float16)
        even = tl.zeros([BLOCK_GROUP, BLOCK_DIM // 2], tl.float32)
        odd = tl.zeros([BLOCK_GROUP, BLOCK_DIM // 2], tl.float32)
    else:
        queries = tl.load(query + column[None, :], mask=wanted, other=0.0)
        acc = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    highest = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    for first in tl.range(begin, end, BLOCK_KEYS, num_stages=STAGES):
        position = tl.minimum(first + lane, end - 1)
        place = (block.to(tl.int64) * PAGE + position % PAGE) * KV_HEADS + kv_head
        block = tl.load(table + tl.minimum(first + BLOCK_KEYS + lane, end - 1) // PAGE)
        if FP8:
            at = place[:, None] * (DIM // 2) + pair_column[None, :]
            even_k, odd_k = _from_pairs(_load(keys + at, real_pair, BLOCK_DIM > DIM))
            even_v, odd_v = _from_pairs(_load(values + at, real_pair, BLOCK_DIM > DIM))
            scores = tl.dot(even_queries, tl.trans(even_k))
            scores = tl.dot(odd_queries, tl.trans(odd_k), scores)
            # A weight times its value's scale is what multiplies the value: taken into the exponent, the largest such
            # product is 1 and keeps its precision in float16.
            value_scale = tl.load(value_scales + place)
            scores = scores * (scale * tl.load(key_scales + place))[None, :] + tl.log2(value_scale)[None, :]
        else:
            at = place[:, None] * DIM + column[None, :]
            k = _load(keys + at, real, BLOCK_DIM > DIM)
            v = _load(values + at, real, BLOCK_DIM > DIM)
            scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((first + lane)[None, :] < limit, scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, axis=1))
        # A row may end before this split does, or before it begins.
        least = tl.where(new == float("-inf"), 0.0, new) if ROWS > 1 else new
        weight = tl.exp2(scores - least[:, None])
        correction = tl.exp2(highest - least)
        if FP8:
            total = total * correction + tl.sum(weight * (1.0 / value_scale)[None, :], axis=1)
            even = tl.dot(weight.to(tl.float16), even_v, even * correction[:, None])
            odd = tl.dot(weight.to(tl.float16), odd_v, odd * correction[:, None])
        else:
            total = total * correction + tl.sum(weight, axis=1)
            acc = tl.dot(weight.to(queries.dtype), v, acc * correction[:, None], input_precision="ieee")
        highest = new

    if FP8:
        acc = tl.interleave(even, odd)
    if share >= context:
        out_places = _places(row, first_head, member, out_stride, DIM, GROUP, ROWS)
        gate_places = _places(row, first_head, member, gate_stride, DIM, GROUP, ROWS)
        _store(acc / total[:, None], out, gate, out_places, gate_places, column, wanted)
        return
    pair = row // ROWS * KV_HEADS + kv_head
    own = (pair * num_splits + split) * (ROWS * GROUP) + member
    tl.store(partial + own[:, None] * DIM + column[None, :], acc, mask=wanted)
    tl.store(statistics + own * 2, highest, mask=member < ROWS * GROUP)
    tl.store(statistics + own * 2 + 1, total, mask=member < ROWS * GROUP)
    # All threads' stores come before the count, and the count before the last one's loads (release, acquire).
    tl.debug_barrier()
    used = tl.cdiv(context, share)
    if tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu") != used - 1:
        return
    tl.store(arrived + pair, 0)
    member = tl.arange(0, MERGE_GROUP)
    of_group = member < ROWS * GROUP
    highest = tl.full([MERGE_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([MERGE_GROUP], tl.float32)
    merged = tl.zeros([MERGE_GROUP, BLOCK_DIM], tl.float32)
    for step in tl.range(0, used, MERGE_STEP):
        part = step + tl.arange(0, MERGE_STEP)
        at = (pair * num_splits + part)[:, None] * (ROWS * GROUP) + member[None, :]
        some = (part < used)[:, None] & of_group[None, :]
        top = tl.load(statistics + at * 2, mask=some, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(statistics + at * 2 + 1, mask=some, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            partial + at[:, :, None] * DIM + column[None, None, :],
            mask=some[:, :, None] & real[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new = tl.maximum(highest, tl.max(top, axis=0))
        factor = tl.where(some, tl.exp2(top - new[None, :]), 0.0)
        correction = tl.exp2(highest - new)
        total = total * correction + tl.sum(sums * factor, axis=0)
        merged = merged * correction[:, None] + tl.sum(parts * factor[:, :, None], axis=0)
        highest = new
    wanted = of_group[:, None] & real[None, :]
    out_places = _places(row, first_head, member, out_stride, DIM, GROUP, ROWS)
    gate_places = _places(row, first_head, member, gate_stride, DIM, GROUP, ROWS)
    _store(merged / total[:, None], out, gate, out_places, gate_places, column, wanted)


def paged_decode(
    q: Tensor,
    projected: Tensor,
    kv: KvPages,
    tables: Tensor,
    slots: Tensor,
    positions: Tensor,
    num_splits: int,
    *,
    workspace: DecodeWorkspace | None = None,
    out: Tensor | None = None,
    config: DecodeConfig | None = None,
    together: int = 1,
    pdl: bool = False,
) -> Tensor:
    """``softmax(q kᵀ / √head_dim) v · sigmoid(gate)`` for one position a row, against its pages.

    Online softmax (Milakov and Gimelshein, arXiv 1805.02867) split over the keys (Dao et al., Flash-Decoding, 2023).
    Deterministic; a row's bits depend on its own context, ``num_splits`` and the configuration only.

    Args:
        q: [B, heads, head_dim] bf16 or float32, contiguous.
        projected: [B, width]; its first heads · head_dim columns are the output gate.
        kv: pages that already hold the new position.
        tables: [num_slots, max_blocks] int32.
        slots: [B] int32: row of ``tables``. Padded rows: slot 0, position 0.
        positions: [B] int32: context length - 1. Of rows that belong together the first one's slot counts, and each
            sees its own context.
        num_splits: most splits of a row, see decode_splits().
        workspace: with at least B rows and exactly num_splits splits. None: a fresh one, if num_splits > 1.
        out: [B, heads · head_dim], where to write the result.
        config: decode_config() for the tensors' device and B / together rows if None.
        together: consecutive rows that are positions of one sequence, whose pages are read once for all of them.
        pdl: launch before the kernels ahead have finished (kernels.gpu.launch.programmatic): they may write no more of
            ``slots``, ``positions``, ``tables`` and the pages than the newest positions.

    Returns:
        [B, heads · head_dim] in q's dtype.

    Raises:
        ValueError: shapes do not fit.
    """
    rows, heads, dim = q.shape
    if heads % kv.kv_heads or dim != kv.head_dim or not q.is_contiguous() or projected.stride(1) != 1:
        raise ValueError(f"paged_decode: q {tuple(q.shape)} must be contiguous and fit pages {tuple(kv.keys.shape)}")
    if slots.shape != (rows,) or positions.shape != (rows,) or projected.shape[0] != rows:
        raise ValueError(
            f"paged_decode: {rows} rows, slots {tuple(slots.shape)}, positions {tuple(positions.shape)}, "
            f"projected {tuple(projected.shape)}"
        )
    if together < 1 or rows % together:
        raise ValueError(f"paged_decode: {rows} rows are not of sequences with {together} each")
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"paged_decode: num_splits must be 1 to {MAX_SPLITS}, got {num_splits}")
    if out is None:
        out = torch.empty(rows, heads * dim, dtype=q.dtype, device=q.device)
    if rows == 0:
        return out
    group = heads // kv.kv_heads
    if workspace is None:
        workspace = DecodeWorkspace.allocate(rows, heads, kv.kv_heads, num_splits, dim, q.device)
    if workspace.partial.shape[0] < rows or workspace.partial.shape[1:] != (kv.kv_heads, num_splits, group, dim):
        raise ValueError(
            f"paged_decode: workspace {tuple(workspace.partial.shape)} is not for {rows} rows, {num_splits} splits"
        )
    sequences, members = rows // together, together * group
    chosen = config or decode_config(kv, sequences, limits_of(q.device))
    _decode_kernel[(kv.kv_heads, sequences, num_splits)](
        q,
        projected,
        kv.keys.view(torch.uint16) if kv.quantized else kv.keys,
        kv.values.view(torch.uint16) if kv.quantized else kv.values,
        kv.keys if kv.key_scales is None else kv.key_scales,
        kv.values if kv.value_scales is None else kv.value_scales,
        tables,
        slots,
        positions,
        out,
        workspace.partial,
        workspace.statistics,
        workspace.arrived,
        dim**-0.5 * _LOG2_E,
        projected.stride(0),
        out.stride(0),
        tables.stride(0),
        num_splits,
        chosen.splits,
        chosen.min_keys,
        chosen.max_keys,
        KV_HEADS=kv.kv_heads,
        GROUP=group,
        ROWS=together,
        DIM=dim,
        PAGE=kv.block_size,
        FP8=kv.quantized,
        BLOCK_GROUP=max(_DOT_ROWS, triton.next_power_of_2(members)),
        BLOCK_KEYS=chosen.block_keys,
        BLOCK_DIM=max(32 if kv.quantized else 16, triton.next_power_of_2(dim)),
        MERGE_STEP=max(1, min(chosen.merge, _MERGED // triton.next_power_of_2(members))),
        MERGE_GROUP=triton.next_power_of_2(members),
        STAGES=chosen.stages,
        PDL=pdl,
        num_warps=chosen.warps,
        launch_pdl=pdl,
    )
    return out
