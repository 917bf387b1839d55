"""Prefill attention for bfloat16 pages on Hopper, bit for bit that of `kernels.gpu.attention.prefill`: tensor cores
work on while a step is weighed.

Triton issues a product and waits for it, so that tensor cores idle during the softmax. Written in Gluon, Triton's
language below that one, scores of the next step and values of this one are issued together, and the softmax of the
next step is computed under the latter (FlashAttention-3's overlap within a warpgroup, Shah et al., arXiv 2407.08608).
Copies of the steps behind are issued under them too. Triton's interpreter does not know Gluon: this kernel is tested on
a GPU, and compiled elsewhere.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803, N806
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK_ROWS = 128
"""Tokens times query heads of a group of one program: 64 of each of its two warpgroups."""
BLOCK_KEYS = 64
"""Keys of one step."""
WARPS = 8
DIM = 256
"""The head's dimensions: a warp copies one key in one instruction."""


@gluon.jit
def _blocks(table, step, last_page, PAGE: gl.constexpr, KEYS: gl.constexpr, COPY: gl.constexpr):
    """The table's entries for the pages of a step; past the last one, that one again."""
    page = step * (KEYS // PAGE) + gl.arange(0, KEYS // PAGE, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    return gl.load(table + gl.minimum(page, last_page))


@gluon.jit
def _copy(
    pages, shared, block, kv_head, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, COPY: gl.constexpr
):
    """Starts the copy of whole pages to ``shared`` [KEYS, DIM], in a group of its own."""
    dim: gl.constexpr = shared.shape[1]
    row = gl.arange(0, PAGE, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    column = gl.arange(0, dim, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))
    place = (block.to(gl.int64) * (PAGE * KV_HEADS * dim))[:, None, None]
    at = pages + kv_head * dim + place + ((row * (KV_HEADS * dim))[None, :, None] + column[None, None, :])
    async_copy.async_copy_global_to_shared(shared.reshape([KEYS // PAGE, PAGE, dim]), at)
    async_copy.commit_group()


@gluon.jit
def _copy_last(
    pages,
    shared,
    table,
    step,
    end,
    kv_head,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    KEYS: gl.constexpr,
    COPY: gl.constexpr,
):
    """The same for values of a step that may lie past the end: the last one stands for those, because what the pages
    hold there may be NaN, which a weight of zero does not hide."""
    dim: gl.constexpr = shared.shape[1]
    page = gl.arange(0, KEYS // PAGE, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    row = gl.arange(0, PAGE, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    column = gl.arange(0, dim, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))
    position = gl.minimum(step * KEYS + (page * PAGE)[:, None, None] + row[None, :, None], end - 1)
    block = gl.load(table + position // PAGE).to(gl.int64)
    at = pages + kv_head * dim + (block * PAGE + position % PAGE) * (KV_HEADS * dim) + column[None, None, :]
    async_copy.async_copy_global_to_shared(shared.reshape([KEYS // PAGE, PAGE, dim]), at)
    async_copy.commit_group()


@gluon.jit
def _softmax_step(scores, first, query_position, scale, highest, total, MASKED: gl.constexpr, SCORES: gl.constexpr):
    """Weights of raw scores, the new maximum and sum, and the factor of what was added up so far."""
    if MASKED:
        position = first + gl.arange(0, scores.shape[1], gl.SliceLayout(0, SCORES))
        scores = gl.where(position[None, :] <= query_position[:, None], scores, float("-inf"))
    new = gl.maximum(highest, gl.max(scores, axis=1) * scale)
    weight = gl.exp2(scores * scale - new[:, None])
    correction = gl.exp2(highest - new)
    return weight, new, total * correction + gl.sum(weight, axis=1), correction


# Numbers that change with the step or the settings must not compile another variant.
@gluon.jit(
    do_not_specialize=["tiles", "table_stride"],
    do_not_specialize_on_alignment=["segment_begin", "segment_start", "segment_slot", "tile_segment", "tile_row"],
)
def prefill_kernel(
    q,
    gate,
    keys,
    values,
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
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    TOKENS: gl.constexpr,
    PARTS: gl.constexpr,
    KEYS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Launched by `kernels.gpu.attention.prefill.paged_prefill`, whose kernel has the same arguments."""
    ROWS: gl.constexpr = TOKENS * GROUP
    WARPS: gl.constexpr = gl.num_warps()
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, k_width=2)
    OF_OUTPUT: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    OF_SCORES: gl.constexpr = gl.SliceLayout(1, SCORES)
    # 16 bytes a thread. Eight keys of a page are one thread's, which needs one entry of the table for them.
    COPY: gl.constexpr = gl.BlockedLayout([1, PAGE // 2, 8], [1, 1, 32], [WARPS // 2, 2, 1], [2, 1, 0])
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if PDL:
        # Padding waits too: the kernel behind relies on all kernels ahead of this one.
        gdc_wait()
        gdc_launch_dependents()
    # Last tiles first: within a segment they have the most keys, and short programs fill the gaps at the end.
    work = tiles * PARTS - 1 - gl.program_id(0)
    tile = work // PARTS
    kv_head = gl.program_id(1)
    segment = gl.load(tile_segment + tile)
    if segment < 0:
        return
    first_row = gl.load(tile_row + tile) + (work % PARTS) * TOKENS
    begin = gl.load(segment_begin + segment)
    last_row = gl.load(segment_begin + segment + 1)
    if first_row >= last_row:
        return
    first_position = gl.load(segment_start + segment) + first_row - begin
    count = gl.minimum(TOKENS, last_row - first_row)
    end = first_position + count
    last_page = (end - 1) // PAGE
    table = tables + gl.load(segment_slot + segment).to(gl.int64) * table_stride

    shared_keys = gl.allocate_shared_memory(keys.dtype.element_ty, [2, KEYS, DIM], SHARED)
    shared_values = gl.allocate_shared_memory(keys.dtype.element_ty, [2, KEYS, DIM], SHARED)
    shared_queries = gl.allocate_shared_memory(keys.dtype.element_ty, [ROWS, DIM], SHARED)
    block = _blocks(table, 0, last_page, PAGE, KEYS, COPY)
    _copy(keys, shared_keys.index(0), block, kv_head, KV_HEADS, PAGE, KEYS, COPY)
    block = _blocks(table, 1, last_page, PAGE, KEYS, COPY)
    _copy(keys, shared_keys.index(1), block, kv_head, KV_HEADS, PAGE, KEYS, COPY)
    _copy_last(values, shared_values.index(0), table, 0, end, kv_head, KV_HEADS, PAGE, KEYS, COPY)

    lane = gl.arange(0, ROWS, gl.SliceLayout(1, ROW))
    token = lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    column = gl.arange(0, DIM, gl.SliceLayout(0, ROW))
    row = (first_row + token).to(gl.int64)
    wanted = (token < count)[:, None]
    at = q + (row * (KV_HEADS * GROUP) + head)[:, None] * DIM + column[None, :]
    shared_queries.store(gl.load(at, mask=wanted, other=0.0))

    query_position = first_position + gl.arange(0, ROWS, OF_SCORES) // GROUP
    highest = gl.full([ROWS], float("-inf"), gl.float32, OF_SCORES)
    total = gl.zeros([ROWS], gl.float32, OF_SCORES)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    acc = gl.zeros([ROWS, DIM], gl.float32, OUTPUT)
    async_copy.wait_group(2)
    fence_async_shared()
    scores = warpgroup_mma(shared_queries, shared_keys.index(0).permute((1, 0)), nothing, use_acc=False)
    weight, highest, total, _ = _softmax_step(scores, 0, query_position, scale, highest, total, True, SCORES)
    weights = gl.convert_layout(weight.to(keys.dtype.element_ty), WEIGHTS)
    steps = gl.cdiv(end, KEYS)
    # Every row sees the keys up to the first row's own position; the steps beyond need the causal mask.
    unmasked = gl.minimum((first_position + 1) // KEYS, steps)
    near = block
    far = _blocks(table, 2, last_page, PAGE, KEYS, COPY)
    first_step = 0
    last_step = gl.maximum(unmasked - 1, 0)
    for masked in gl.static_range(2):
        for step in range(first_step, last_step):
            # Keys of the next step are in the group before the last, values of this one in the last.
            async_copy.wait_group(1)
            fence_async_shared()
            next_keys = shared_keys.index((step + 1) % 2).permute((1, 0))
            ahead = warpgroup_mma(shared_queries, next_keys, nothing, use_acc=False, is_async=True)
            async_copy.wait_group(0)
            fence_async_shared()
            acc = warpgroup_mma(weights, shared_values.index(step % 2), acc, is_async=True)
            _copy(keys, shared_keys.index(step % 2), far, kv_head, KV_HEADS, PAGE, KEYS, COPY)
            next_values = shared_values.index((step + 1) % 2)
            if masked:
                _copy_last(values, next_values, table, step + 1, end, kv_head, KV_HEADS, PAGE, KEYS, COPY)
            else:
                _copy(values, next_values, near, kv_head, KV_HEADS, PAGE, KEYS, COPY)
            near = far
            far = _blocks(table, step + 3, last_page, PAGE, KEYS, COPY)
            scores = warpgroup_mma_wait(1, deps=[ahead])
            weight, highest, total, correction = _softmax_step(
                scores, (step + 1) * KEYS, query_position, scale, highest, total, masked, SCORES
            )
            acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
            weights = gl.convert_layout(weight.to(keys.dtype.element_ty), WEIGHTS)
            acc = acc * gl.convert_layout(correction, OF_OUTPUT)[:, None]
        first_step = last_step
        last_step = steps - 1
    async_copy.wait_group(0)
    fence_async_shared()
    acc = warpgroup_mma(weights, shared_values.index((steps - 1) % 2), acc)
    # Rounded before the gate, as in the reference.
    attended = (acc / gl.convert_layout(total, OF_OUTPUT)[:, None]).to(out.dtype.element_ty)
    attended = gl.convert_layout(attended, ROW)
    column_of = head[:, None] * DIM + column[None, :]
    g = gl.load(gate + row[:, None] * gate_stride + column_of, mask=wanted, other=0.0)
    result = attended.to(gl.float32) / (1.0 + gl.exp(-g.to(gl.float32)))
    gl.store(out + row[:, None] * out_stride + column_of, result.to(out.dtype.element_ty), mask=wanted)
