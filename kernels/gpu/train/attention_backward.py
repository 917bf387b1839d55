"""Backward of the packed causal attention and of its output gate.

With P the softmax' weights, o its output and D_t = do_t·o_t (FlashAttention-2, arXiv 2307.08691, algorithm 2):

    dv_s = Σ_t P[t, s] do_t     dS[t, s] = P[t, s] (do_t·v_s − D_t) / √head_dim     dq = dS k     dk = dSᵀ q

Three kernels: the gate's backward with D; keys and values, a block of keys a program; queries, some tokens a program.
The weights are computed again from the denominators. No atomic additions: equal input gives equal bits.
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

from kernels.gpu.elementary import sigmoid_for
from kernels.gpu.launch.device import DeviceLimits, Size, limits_of
from kernels.gpu.segments import TILE
from kernels.gpu.train.attention import EXACT, LOG2_E, AttentionCut, AttentionShape, rows_of, values_of, within
from kernels.gpu.train.documents import Documents


@triton.jit
def _gate_kernel(
    attended,
    gate,
    grad,
    dattended,
    dgate,
    gated,
    products,
    tokens,
    gate_stride,
    grad_stride,
    dgate_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    wide = row.to(tl.int64)
    place = head * DIM + column
    o = tl.load(attended + wide * (HEADS * DIM) + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + wide * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(grad + wide * grad_stride + place, mask=inside, other=0.0).to(tl.float32)
    open_ = sigmoid_for(g, gated.dtype.element_ty)
    do = (dy * open_).to(dattended.dtype.element_ty)
    tl.store(dattended + wide * (HEADS * DIM) + place, do, mask=inside)
    dg = dy * o * open_ * (1.0 - open_)
    tl.store(dgate + wide * dgate_stride + place, dg.to(dgate.dtype.element_ty), mask=inside)
    tl.store(gated + wide * (HEADS * DIM) + place, (o * open_).to(gated.dtype.element_ty), mask=inside)
    tl.store(products + head.to(tl.int64) * tokens + row, tl.sum(do.to(tl.float32) * o, axis=0))


@triton.jit
def _keys_kernel(
    rotated,
    values,
    grad,
    normalizer,
    products,
    begins,
    tile_segment,
    tile_row,
    until,
    drotated,
    dvalues,
    tokens,
    scale,
    projected_stride,
    dvalues_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    STAGES: tl.constexpr,
    LOG2: tl.constexpr,
    JOINED: tl.constexpr,
    OF_KEYS: tl.constexpr,
    OF_VALUES: tl.constexpr,
):
    # First tiles of all heads first: within a document their keys have the most queries, and short programs fill the
    # gaps at the end.
    kv_head = tl.program_id(0)
    work = tl.program_id(1)
    tile = work // PARTS
    heads: tl.constexpr = KV_HEADS * GROUP
    segment = tl.load(tile_segment + tile)
    if segment < 0:
        return
    end = tl.load(begins + segment + 1)
    first_key = tl.load(tile_row + tile) + work % PARTS * BLOCK_KEYS
    if first_key >= end:
        return
    # The first of so many tiles of a segment has the keys of all of them.
    if JOINED > 1 and (first_key - tl.load(begins + segment)) // (BLOCK_KEYS // JOINED) % JOINED != 0:
        return
    # In depth-first order all rows behind that see the keys follow without a gap.
    reached = end
    if until is not None:
        reached = tl.load(until + segment)
    key = first_key + tl.arange(0, BLOCK_KEYS)
    there = key < end
    k = rows_of(rotated, key, heads + kv_head, heads + KV_HEADS, DIM, BLOCK_DIM, there)
    if OF_KEYS:
        v = values_of(values, key, projected_stride, kv_head, DIM, BLOCK_DIM, there)
        dk = tl.zeros([BLOCK_KEYS, BLOCK_DIM], tl.float32)
    if OF_VALUES:
        dv = tl.zeros([BLOCK_KEYS, BLOCK_DIM], tl.float32)
    lane = tl.arange(0, TOKENS * BLOCK_GROUP)
    member = lane % BLOCK_GROUP
    head = kv_head * GROUP + member
    for first in tl.range(first_key, reached, TOKENS, num_stages=STAGES):
        row = first + lane // BLOCK_GROUP
        real = (row < reached) & (member < GROUP)
        q = rows_of(rotated, row, head, heads + KV_HEADS, DIM, BLOCK_DIM, real)
        do = rows_of(grad, row, head, heads, DIM, BLOCK_DIM, real)
        place = head.to(tl.int64) * tokens + row
        log_total = tl.load(normalizer + place, mask=real, other=float("inf"))
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2) - log_total[None, :]
        weight = tl.where(key[:, None] <= row[None, :], tl.exp2(scores), 0.0)
        if OF_VALUES:
            dv = tl.dot(weight.to(do.dtype), do, dv, input_precision="ieee")
        if OF_KEYS:
            product = tl.load(products + place, mask=real, other=0.0)
            dweight = tl.dot(v, tl.trans(do), input_precision="ieee")
            dscores = weight * (dweight - product[None, :])
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")
    # Addresses kept through the loop do not fit the registers: read again, for the compiler to compute them here.
    key = tl.load(tile_row + tile, volatile=True) + work % PARTS * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    there = key < tl.load(begins + segment + 1, volatile=True)
    column = tl.arange(0, BLOCK_DIM)
    mask = within(there, column, DIM, BLOCK_DIM)
    wide = key.to(tl.int64)[:, None]
    if OF_KEYS:
        at = drotated + (wide * (heads + KV_HEADS) + heads + kv_head) * DIM + column[None, :]
        tl.store(at, (dk * scale).to(drotated.dtype.element_ty), mask=mask)
    if OF_VALUES:
        at = dvalues + wide * dvalues_stride + kv_head * DIM + column[None, :]
        tl.store(at, dv.to(dvalues.dtype.element_ty), mask=mask)


@triton.jit
def _query_grad(q, k, v, do, seen, log_total, product, scale, dq):
    """dq of these keys, which the queries see where ``seen``, onto that of others."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale - log_total[:, None]
    weight = tl.where(seen, tl.exp2(scores), 0.0)
    dweight = tl.dot(do, tl.trans(v), input_precision="ieee")
    dscores = weight * (dweight - product[:, None])
    return tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit
def _queries_kernel(
    rotated,
    values,
    grad,
    normalizer,
    products,
    begins,
    tile_segment,
    tile_row,
    parents,
    drotated,
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
    LOG2: tl.constexpr,
):
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
    q = rows_of(rotated, row, head, heads + KV_HEADS, DIM, BLOCK_DIM, real)
    do = rows_of(grad, row, head, heads, DIM, BLOCK_DIM, real)
    place = head.to(tl.int64) * tokens + row
    log_total = tl.load(normalizer + place, mask=real, other=float("inf"))
    product = tl.load(products + place, mask=real, other=0.0)
    dq = tl.zeros([TOKENS * BLOCK_GROUP, BLOCK_DIM], tl.float32)
    last = tl.minimum(first_row + TOKENS, end)
    for first in tl.range(begin, last, BLOCK_KEYS, num_stages=STAGES):
        key = first + tl.arange(0, BLOCK_KEYS)
        there = key < last
        k = rows_of(rotated, key, heads + kv_head, heads + KV_HEADS, DIM, BLOCK_DIM, there)
        v = values_of(values, key, projected_stride, kv_head, DIM, BLOCK_DIM, there)
        seen = key[None, :] <= row[:, None]
        dq = _query_grad(q, k, v, do, seen, log_total, product, scale * LOG2, dq)
    if parents is not None:
        above = tl.load(parents + segment)
        while above >= 0:
            key_to = tl.load(begins + above + 1)
            for first in tl.range(tl.load(begins + above), key_to, BLOCK_KEYS, num_stages=STAGES):
                key = first + tl.arange(0, BLOCK_KEYS)
                there = key < key_to
                k = rows_of(rotated, key, heads + kv_head, heads + KV_HEADS, DIM, BLOCK_DIM, there)
                v = values_of(values, key, projected_stride, kv_head, DIM, BLOCK_DIM, there)
                dq = _query_grad(q, k, v, do, there[None, :], log_total, product, scale * LOG2, dq)
            above = tl.load(parents + above)
    column = tl.arange(0, BLOCK_DIM)
    mask = within(real, column, DIM, BLOCK_DIM)
    at = drotated + (row.to(tl.int64) * (heads + KV_HEADS) + head)[:, None] * DIM + column[None, :]
    tl.store(at, (dq * scale).to(drotated.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class BackwardCuts:
    """Cuts of attention_backward()'s kernels."""

    keys: AttentionCut
    queries: AttentionCut
    values: AttentionCut | None = None
    """Of a kernel for the values alone. None: that for the keys makes their gradients, too, with one product less; but
    it has both sums in its registers, so that fewer keys share what it reads of the queries."""


# 64 rows a step of the keys' kernel are 15 % faster, and spill.
_KEYS = AttentionCut(rows=32, keys=64, warps=8, stages=2)
_EXACT = BackwardCuts(EXACT, EXACT)
_WIDE = BackwardCuts(
    keys=AttentionCut(rows=32, keys=128, warps=8, stages=2),
    queries=AttentionCut(rows=128, keys=64, warps=8, stages=1),
    values=AttentionCut(rows=64, keys=128, warps=8, stages=2),
)
_BY_SIZE: dict[Size, BackwardCuts] = {
    "small": BackwardCuts(
        AttentionCut(rows=16, keys=64, warps=8, stages=2), AttentionCut(rows=32, keys=32, warps=4, stages=2)
    ),
    "large": BackwardCuts(_KEYS, AttentionCut(rows=64, keys=32, warps=8, stages=2)),
    "wide": _WIDE,
}
# A third stage takes 11 % of the keys' kernel away on an H200; compiled for sm_100 it asks for more than a block has.
_MEASURED = {90: replace(_WIDE, keys=replace(_WIDE.keys, stages=3))}


def backward_cuts(dtype: torch.dtype, device: DeviceLimits) -> BackwardCuts:
    """The cuts of attention_backward()."""
    if dtype == torch.float32:
        return _EXACT
    return _MEASURED.get(device.architecture) or _BY_SIZE[device.size]


def gate_backward(
    attended: Tensor, projected: Tensor, grad: Tensor, shape: AttentionShape, *, projected_grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of ``attended · sigmoid(gate)``.

    Args:
        attended: [T, query_size] contiguous.
        projected: [T, width], whose first columns are the gate.
        grad: [T, query_size], of the gated output.
        projected_grad: [T, width], whose first columns get the gate's gradient.

    Returns:
        do [T, query_size], the gated output itself [T, query_size] (what the next product read), and D [heads, T]
        float32.
    """
    count = attended.shape[0]
    do, gated = torch.empty(2, count, shape.query_size, dtype=attended.dtype, device=attended.device)
    products = torch.empty(shape.heads, count, dtype=torch.float32, device=attended.device)
    _gate_kernel[(count, shape.heads)](
        attended,
        projected,
        grad,
        do,
        projected_grad,
        gated,
        products,
        count,
        projected.stride(0),
        grad.stride(0),
        projected_grad.stride(0),
        HEADS=shape.heads,
        DIM=shape.head_dim,
        BLOCK=max(16, triton.next_power_of_2(shape.head_dim)),
        num_warps=1,
    )
    return do, gated, products


def attention_backward(
    rotated: Tensor,
    projected: Tensor,
    grad: Tensor,
    normalizer: Tensor,
    products: Tensor,
    shape: AttentionShape,
    documents: Documents,
    *,
    projected_grad: Tensor,
    cuts: BackwardCuts | None = None,
    device: DeviceLimits | None = None,
) -> Tensor:
    """Gradients of the attention's output in queries, keys and values.

    Args:
        rotated, projected, normalizer: the forward's.
        grad: [T, query_size] contiguous, do.
        products: [heads, T] float32, D, of gate_backward().
        projected_grad: [T, width], whose last columns get the values' gradient.
        cuts: backward_cuts() if None.
        device: limits to cut the work up for where no configuration is given; those of the tensors' device if None.

    Returns:
        The gradient in ``rotated``, [T, heads + kv_heads, head_dim].
    """
    out = torch.empty_like(rotated)
    cuts = cuts or backward_cuts(rotated.dtype, device or limits_of(rotated.device))
    tree = documents.tree
    until, parents = (None, None) if tree is None else (tree.until, tree.parent)
    where = (documents.segments.begin, documents.segments.tile_segment, documents.segments.tile_row)
    common = {
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "DIM": shape.head_dim,
        "BLOCK_GROUP": triton.next_power_of_2(shape.group),
        "BLOCK_DIM": max(16, triton.next_power_of_2(shape.head_dim)),
        "LOG2": LOG2_E,
    }
    count, scale = rotated.shape[0], shape.head_dim**-0.5
    values, dvalues = shape.values(projected), shape.values(projected_grad)
    alone = cuts.values is not None
    for cut, of_keys, of_values in ((cuts.keys, True, not alone), (cuts.values, False, True)):
        if cut is None:
            continue
        parts = max(1, TILE // cut.keys)
        _keys_kernel[(shape.kv_heads, documents.tiles * parts)](
            rotated,
            values,
            grad,
            normalizer,
            products,
            *where,
            until,
            out,
            dvalues,
            count,
            scale,
            projected.stride(0),
            projected_grad.stride(0),
            TOKENS=cut.tokens(shape.group),
            PARTS=parts,
            BLOCK_KEYS=cut.keys,
            STAGES=cut.stages,
            JOINED=max(1, cut.keys // TILE),
            OF_KEYS=of_keys,
            OF_VALUES=of_values,
            num_warps=cut.warps,
            **common,
        )
    queries = cuts.queries
    tokens = queries.tokens(shape.group)
    _queries_kernel[(documents.tiles * (TILE // tokens), shape.kv_heads)](
        rotated,
        values,
        grad,
        normalizer,
        products,
        *where,
        parents,
        out,
        documents.tiles,
        count,
        scale,
        projected.stride(0),
        TOKENS=tokens,
        PARTS=TILE // tokens,
        BLOCK_KEYS=queries.keys,
        STAGES=queries.stages,
        num_warps=queries.warps,
        **common,
    )
    return out
