"""Gradients of the gated delta rule in queries, keys, values and gates, all tiles at once.

Given dR and dS′ of `gated_delta_backward`, and with E[t, s] = exp(G_t − G_s):

    dP[t, s] = (do_t·W_s) E[t, s], s ≤ t        dA[t, s] = −(dR_t·W_s) E[t, s], s < t   (without β_t)
    dq̂ = exp(G) S do + dP k̂
    dk̂ = β r + c  with  r = −exp(G) S dR + dA k̂        (as the key that is read with)
                        c = exp(G_L − G) dS′ W + dPᵀ q̂ + (β dA)ᵀ k̂     (as the key that is written and found)
    dv = β dR      dβ_t = dR_t·v_t + k̂_t·r_t
    dG_t = q̂_t·dq̂_t + β_t k̂_t·r_t − k̂_t·c_t, and at a tile's last token also exp(G_L) ⟨S, dS′⟩ + Σ_s k̂_s·c′_s

where c′ is the first term of c: every exponent is the difference of the decay sums at two places, and each product of
a gradient with its own vector is the derivative in the sum at that place. The log decay g_t is in every G_u, u ≥ t.
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
from kernels.gpu.delta.step import log_decay
from kernels.gpu.elementary import exponential, exponential_for, inverse_root, sigmoid
from kernels.gpu.segments import TILE
from kernels.gpu.train.documents import Documents
from kernels.gpu.train.gated_delta import DeltaTrace, product

_FINISH_ROWS = 16


@triton.jit
def _whole(x):
    """Sum of a vector, [1]. Triton 3.7 fails for sm_100 where a sum of sums of a product is a scalar."""
    return tl.sum(x[None, :], axis=1)


@triton.jit(do_not_specialize=["tokens"])
def _gradients_kernel(
    mixed,
    projected,
    negative_a,
    dt_bias,
    begins,
    tile_segment,
    tile_row,
    writes,
    states,
    grad,
    write_grads,
    state_grads,
    mixed_grad,
    projected_grad,
    parts,
    tokens,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MIXED_STRIDE: tl.constexpr,
    PROJECTED_STRIDE: tl.constexpr,
):
    head = tl.program_id(0)
    key_head = head // (HEADS // KEY_HEADS)
    tile = tl.program_id(1)
    segment = tl.load(tile_segment + tile)
    if segment < 0:
        return
    end = tl.load(begins + segment + 1)
    i = tl.arange(0, BLOCK_K)
    t = tl.arange(0, TILE_ROWS)
    row = (tl.load(tile_row + tile) + t).to(tl.int64)
    inside = row < end
    key_mask = inside[:, None] & (i[None, :] < KEY_DIM)
    vectors = mixed + row[:, None] * MIXED_STRIDE + key_head * KEY_DIM + i[None, :]
    q = tl.load(vectors, mask=key_mask, other=0.0)
    k = tl.load(vectors + KEY_HEADS * KEY_DIM, mask=key_mask, other=0.0)
    q_inverse = inverse_root(tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1) + 1e-6)
    k_inverse = inverse_root(tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1) + 1e-6)
    gates = row * PROJECTED_STRIDE + 2 * KEY_HEADS * KEY_DIM + 2 * HEADS * VALUE_DIM + head
    beta = tl.where(inside, sigmoid(tl.load(projected + gates, mask=inside, other=0.0).to(tl.float32)), 0.0)
    a = tl.load(projected + gates + HEADS, mask=inside, other=0.0).to(tl.float32)
    rate = tl.load(negative_a + head)
    bias = tl.load(dt_bias + head)
    g = tl.where(inside, log_decay(a, rate, bias), 0.0)
    total = tl.cumsum(g, axis=0)
    last = tl.sum(g, axis=0)
    grown = exponential(total)

    # Three rounds over the value dimensions, for one tile of key dimensions at a time to be in registers.
    value_rows = row[:, None] * (HEADS * VALUE_DIM) + head * VALUE_DIM
    mixed_rows = row[:, None] * MIXED_STRIDE + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    state_rows = (tile.to(tl.int64) * HEADS + head) * KEY_DIM * VALUE_DIM + i[:, None] * VALUE_DIM
    part = (row[:, None] * HEADS + head) * KEY_DIM + i[None, :]
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    between = total[:, None] - total[None, :]
    decay = exponential_for(tl.where(t[:, None] >= t[None, :], between, float("-inf")), k.dtype)

    dp = tl.zeros([TILE_ROWS, TILE_ROWS], tl.float32)
    query = tl.zeros([TILE_ROWS, BLOCK_K], tl.float32)
    for first in tl.range(0, VALUE_DIM, BLOCK_V, num_stages=STAGES):
        j = (first + tl.arange(0, BLOCK_V))[None, :]
        value_mask = inside[:, None] & (j < VALUE_DIM)
        w = tl.load(writes + value_rows + j, mask=value_mask, other=0.0)
        do = tl.load(grad + value_rows + j, mask=value_mask, other=0.0)
        s = tl.load(states + state_rows + j, mask=(i[:, None] < KEY_DIM) & (j < VALUE_DIM), other=0.0)
        dp = product(do, tl.trans(w), dp)
        query = product(do, tl.trans(s), query)
    dp *= decay * k_inverse[None, :]
    query *= grown[:, None]
    query = tl.dot(dp.to(k.dtype), k, query, input_precision="tf32x3")
    query *= (q_inverse * scale)[:, None]
    decayed = tl.sum(query * q.to(tl.float32), axis=1)
    tl.store(parts + part, query.to(parts.dtype.element_ty), mask=key_mask)
    dp = tl.trans((dp * (q_inverse * scale)[:, None]).to(q.dtype))

    da = tl.zeros([TILE_ROWS, TILE_ROWS], tl.float32)
    written = tl.zeros([TILE_ROWS, BLOCK_K], tl.float32)
    dbeta = tl.zeros([TILE_ROWS], tl.float32)
    ahead = tl.zeros([BLOCK_K], tl.float32)
    for first in tl.range(0, VALUE_DIM, BLOCK_V, num_stages=STAGES):
        j = (first + tl.arange(0, BLOCK_V))[None, :]
        value_mask = inside[:, None] & (j < VALUE_DIM)
        held = (i[:, None] < KEY_DIM) & (j < VALUE_DIM)
        w = tl.load(writes + value_rows + j, mask=value_mask, other=0.0)
        dr = tl.load(write_grads + value_rows + j, mask=value_mask, other=0.0)
        ds = tl.load(state_grads + state_rows + j, mask=held, other=0.0)
        da = product(dr, tl.trans(w), da)
        written = product(w, tl.trans(ds), written)
        s = tl.load(states + state_rows + j, mask=held, other=0.0)
        ahead += tl.sum(s.to(tl.float32) * ds.to(tl.float32), axis=1)
        v = tl.load(mixed + mixed_rows + j, mask=value_mask, other=0.0).to(tl.float32)
        dbeta += tl.sum(dr.to(tl.float32) * v, axis=1)
        dv = (dr.to(tl.float32) * beta[:, None]).to(mixed_grad.dtype.element_ty)
        tl.store(mixed_grad + mixed_rows + j, dv, mask=value_mask)
    da *= tl.where(t[:, None] > t[None, :], -decay, 0.0) * k_inverse[:, None] * k_inverse[None, :]
    written *= (exponential(last - total) * k_inverse)[:, None]
    from_end = exponential(last) * tl.sum(ahead, axis=0)
    from_end += _whole(tl.where(inside, tl.sum(written * k.to(tl.float32), axis=1), 0.0))
    written = tl.dot(dp, q, written, input_precision="tf32x3")
    written = tl.dot(tl.trans((da * beta[:, None]).to(k.dtype)), k, written, input_precision="tf32x3")
    decayed -= tl.sum(written * k.to(tl.float32), axis=1)

    read = tl.zeros([TILE_ROWS, BLOCK_K], tl.float32)
    for first in tl.range(0, VALUE_DIM, BLOCK_V, num_stages=STAGES):
        j = (first + tl.arange(0, BLOCK_V))[None, :]
        s = tl.load(states + state_rows + j, mask=(i[:, None] < KEY_DIM) & (j < VALUE_DIM), other=0.0)
        dr = tl.load(write_grads + value_rows + j, mask=inside[:, None] & (j < VALUE_DIM), other=0.0)
        read = product(dr, tl.trans(s), read)
    read *= (-grown * k_inverse)[:, None]
    read = tl.dot(da.to(k.dtype), k, read, input_precision="tf32x3")
    read_sum = tl.sum(read * k.to(tl.float32), axis=1)
    decayed += beta * read_sum
    db = (dbeta + read_sum) * beta * (1.0 - beta)
    tl.store(projected_grad + gates, db.to(projected_grad.dtype.element_ty), mask=inside)
    dk = written + read * beta[:, None]
    tl.store(parts + HEADS * KEY_DIM * tokens.to(tl.int64) + part, dk.to(parts.dtype.element_ty), mask=key_mask)

    # What the last token's sum is part of, every token's decay is.
    decayed = tl.where(inside, decayed, 0.0)
    dg = _whole(decayed) - tl.cumsum(decayed, axis=0) + decayed + from_end
    da_input = dg * rate * sigmoid(a + bias)
    tl.store(projected_grad + gates + HEADS, da_input.to(projected_grad.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _finish_kernel(
    mixed,
    parts,
    mixed_grad,
    tokens,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    MIXED_STRIDE: tl.constexpr,
):
    """Adds up what the value heads of a key head found, and goes through the normalisation: with u = x / |x|, dx =
    (du − u (u·du)) / |x|. The parts have the factor 1 / |x| already."""
    ratio: tl.constexpr = HEADS // KEY_HEADS
    key_head = tl.program_id(1)
    which = tl.program_id(2)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    i = tl.arange(0, BLOCK_K)[None, :]
    mask = (row < tokens) & (i < KEY_DIM)
    place = row * MIXED_STRIDE + (which * KEY_HEADS + key_head) * KEY_DIM + i
    x = tl.load(mixed + place, mask=mask, other=0.0).to(tl.float32)
    source = parts + which * HEADS * KEY_DIM * tokens.to(tl.int64) + (row * HEADS + key_head * ratio) * KEY_DIM + i
    du = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for member in tl.static_range(ratio):
        du += tl.load(source + member * KEY_DIM, mask=mask, other=0.0).to(tl.float32)
    unit = x * inverse_root(tl.sum(x * x, axis=1) + 1e-6)[:, None]
    dx = du - unit * tl.sum(unit * du, axis=1)[:, None]
    tl.store(mixed_grad + place, dx.to(mixed_grad.dtype.element_ty), mask=mask)


def gated_delta_gradients(
    mixed: Tensor,
    projected: Tensor,
    negative_a: Tensor,
    dt_bias: Tensor,
    trace: DeltaTrace,
    grad: Tensor,
    write_grads: Tensor,
    state_grads: Tensor,
    shape: DeltaShape,
    documents: Documents,
    *,
    projected_grad: Tensor,
    block_v: int = 64,
    num_warps: int = 8,
    num_stages: int = 2,
) -> Tensor:
    """The second half of the backward.

    Args:
        mixed, projected, negative_a, dt_bias: the forward's.
        trace: of the forward.
        grad: [T, value_size] contiguous, do.
        write_grads, state_grads: of scan_backward().
        projected_grad: [T, width]; its last columns, b | a, are written. All three contiguous.
        block_v, num_warps, num_stages: value dimensions of a step, warps of a program, steps in flight.

    Returns:
        The gradient in ``mixed``, [T, conv_dim].

    Raises:
        ValueError: one of them is not contiguous.
    """
    if not (mixed.is_contiguous() and projected.is_contiguous() and projected_grad.is_contiguous()):
        raise ValueError("the convolution's output, the projection and its gradient must be contiguous")
    mixed_grad = torch.empty_like(mixed)
    tokens, heads = mixed.shape[0], shape.value_heads
    parts = torch.empty(2, tokens, heads, shape.key_dim, dtype=mixed.dtype, device=mixed.device)
    _gradients_kernel[(heads, documents.tiles)](
        mixed,
        projected,
        negative_a,
        dt_bias,
        documents.segments.begin,
        documents.segments.tile_segment,
        documents.segments.tile_row,
        trace.writes,
        trace.states,
        grad,
        write_grads,
        state_grads,
        mixed_grad,
        projected_grad,
        parts,
        tokens,
        shape.key_dim**-0.5,
        KEY_HEADS=shape.key_heads,
        HEADS=heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        BLOCK_K=max(16, triton.next_power_of_2(shape.key_dim)),
        BLOCK_V=min(block_v, max(16, triton.next_power_of_2(shape.value_dim))),
        STAGES=num_stages,
        TILE_ROWS=TILE,
        MIXED_STRIDE=mixed.shape[1],
        PROJECTED_STRIDE=projected.shape[1],
        num_warps=num_warps,
    )
    _finish_kernel[(triton.cdiv(tokens, _FINISH_ROWS), shape.key_heads, 2)](
        mixed,
        parts,
        mixed_grad,
        tokens,
        KEY_HEADS=shape.key_heads,
        HEADS=heads,
        KEY_DIM=shape.key_dim,
        BLOCK_K=max(16, triton.next_power_of_2(shape.key_dim)),
        ROWS=_FINISH_ROWS,
        MIXED_STRIDE=mixed.shape[1],
        num_warps=4,
    )
    return mixed_grad
