"""One token of the gated delta rule: gates, L2 norms, recurrence and gated RMSNorm in one pass over the state.

Reference: `kernels.gated_delta.recurrent_gated_delta` with `gates`, and `kernels.rms_norm.{l2_normalize,
gated_rms_norm}`. Formula: Yang et al., Gated Delta Networks, arXiv 2412.06464, eq. 10.
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

from kernels.gpu.delta_shape import DeltaShape


@triton.jit
def log_decay(a, negative_a, dt_bias):
    """``−exp(A_log) · softplus(a + dt_bias)``, all float32."""
    x = a + dt_bias
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    # log(1 + e) without losing a small e (Kahan); torch's softplus is linear from 20 on.
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return negative_a * tl.where(x > 20.0, x, log1p)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def advance(s, q, k, v, q_norm, k_norm, overlap, decay, beta):
    """New state and output of a block of value dimensions.

    Norms are factors of the results, so that no sum waits for another. Sᵀk and Sᵀq are of the old state:
    o = exp(g) Sᵀq + (k·q) δ needs no second look at the new one.
    """
    delta = k_norm * beta * (v - decay * k_norm * tl.sum(s * k[:, None], axis=0))
    o = q_norm * (decay * tl.sum(s * q[:, None], axis=0) + overlap * delta)
    return decay * s + k[:, None] * delta[None, :], o


@triton.jit
def _gated_delta_step_kernel(
    mixed,
    projected,
    negative_a,
    dt_bias,
    norm_weight,
    state,
    slots,
    out,
    eps,
    scale,
    mixed_stride,
    projected_stride,
    out_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    key_head = head // (HEADS // KEY_HEADS)
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    # Neither slots nor states are written by the kernel ahead: the state is on its way before that one has finished.
    slot = tl.load(slots + row).to(tl.int64)
    places = state + ((slot * HEADS + head) * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
    held = i[:, None] < KEY_DIM
    if BLOCKS == 1:
        s = tl.load(places, mask=held & (j[None, :] < VALUE_DIM), other=0.0).to(tl.float32)
    # All value dimensions, [BLOCKS, BLOCK_V].
    column = tl.arange(0, BLOCKS)[:, None] * BLOCK_V + j[None, :]
    inside = column < VALUE_DIM
    weight = tl.load(norm_weight + column, mask=inside, other=0.0)
    rate = tl.load(negative_a + head)
    bias = tl.load(dt_bias + head)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    vector = mixed + row * mixed_stride + key_head * KEY_DIM + i
    q = tl.load(vector, mask=i < KEY_DIM, other=0.0).to(tl.float32)
    k = tl.load(vector + KEY_HEADS * KEY_DIM, mask=i < KEY_DIM, other=0.0).to(tl.float32)
    values = mixed + row * mixed_stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    gates = projected + row * projected_stride + 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    z = tl.load(gates + head * VALUE_DIM + column, mask=inside, other=0.0).to(tl.float32)
    beta = sigmoid(tl.load(gates + HEADS * VALUE_DIM + head).to(tl.float32))
    a = tl.load(gates + HEADS * VALUE_DIM + HEADS + head).to(tl.float32)
    decay = tl.exp(log_decay(a, rate, bias))
    k_norm = 1.0 / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
    q_norm = scale / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6)
    overlap = tl.sum(q * k, axis=0)
    if BLOCKS == 1:
        v = tl.load(values + j, mask=j < VALUE_DIM, other=0.0).to(tl.float32)
        new, part = advance(s, q, k, v, q_norm, k_norm, overlap, decay, beta)
        tl.store(places, new.to(state.dtype.element_ty), mask=held & (j[None, :] < VALUE_DIM))
        o = part[None, :]
    else:
        o = tl.zeros([BLOCKS, BLOCK_V], tl.float32)
        for block in tl.range(BLOCKS, num_stages=STAGES):
            here = block * BLOCK_V
            some = j + here < VALUE_DIM
            s = tl.load(places + here, mask=held & some[None, :], other=0.0).to(tl.float32)
            v = tl.load(values + here + j, mask=some, other=0.0).to(tl.float32)
            new, part = advance(s, q, k, v, q_norm, k_norm, overlap, decay, beta)
            tl.store(places + here, new.to(state.dtype.element_ty), mask=held & some[None, :])
            o = tl.where(tl.arange(0, BLOCKS)[:, None] == block, part[None, :], o)
    inverse = 1.0 / tl.sqrt(tl.sum(tl.sum(o * o, axis=1), axis=0) / VALUE_DIM + eps)
    y = o * inverse * weight * (z * sigmoid(z))
    tl.store(out + row * out_stride + head * VALUE_DIM + column, y.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class StepConfig:
    """How one head of one row is computed by its program."""

    block_v: int
    """Value dimensions at a time. All: the least latency. Fewer: less to hold, so that the loads of some programs
    overlap the arithmetic and the stores of others."""
    num_warps: int
    num_stages: int
    """Blocks in flight."""


FEW = StepConfig(block_v=128, num_warps=8, num_stages=1)
MANY = StepConfig(block_v=32, num_warps=4, num_stages=4)
_FEW_ROWS = 8
"""Up to here all programs run at once."""


def choose(rows: int) -> StepConfig:
    """The fastest measured at the 4B shape."""
    return FEW if rows <= _FEW_ROWS else MANY


def gated_delta_step(
    mixed: Tensor,
    projected: Tensor,
    negative_a: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    state: Tensor,
    slots: Tensor,
    *,
    out: Tensor | None = None,
    config: StepConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """One token of each of B sequences; their states move on in place, each element read and written once.

    One program computes one value head of one row. All arithmetic is float32.

    Args:
        mixed: [B, conv_dim], the convolution's output: query | key | value heads.
        projected: [B, conv_dim + value_size + 2 · value_heads], the mixer's projections: qkv | z | b | a.
        negative_a: [value_heads] float32, −exp(A_log).
        dt_bias: [value_heads] float32.
        norm_weight: [value_dim] float32, plain (not 1 + w).
        eps: of the gated norm.
        state: [num_slots, value_heads, key_dim, value_dim] float32 or bfloat16, contiguous.
        slots: [B] int32. Rows may share only slot 0, whose contents nobody reads.
        out: [B, value_size], where to write.
        config: None chooses by B.
        pdl: launch before the kernel ahead has finished (programmatic dependent launch). ``state`` and ``slots`` are
            then read early: the kernel ahead must not be the one that writes them.

    Returns:
        [B, value_size] in mixed's dtype: rms_norm(o) · silu(z).

    Raises:
        ValueError: shapes do not fit.
    """
    shape = DeltaShape.of(mixed, projected, state)
    rows = slots.shape[0]
    if out is None:
        out = torch.empty(rows, shape.value_size, dtype=mixed.dtype, device=mixed.device)
    if rows:
        if config is None:
            config = choose(rows)
        block_v = min(config.block_v, triton.next_power_of_2(shape.value_dim))
        _gated_delta_step_kernel[(shape.value_heads, rows)](
            mixed,
            projected,
            negative_a,
            dt_bias,
            norm_weight,
            state,
            slots,
            out,
            eps,
            shape.key_dim**-0.5,
            mixed.stride(0),
            projected.stride(0),
            out.stride(0),
            KEY_HEADS=shape.key_heads,
            HEADS=shape.value_heads,
            KEY_DIM=shape.key_dim,
            VALUE_DIM=shape.value_dim,
            BLOCK_K=triton.next_power_of_2(shape.key_dim),
            BLOCK_V=block_v,
            BLOCKS=triton.next_power_of_2(triton.cdiv(shape.value_dim, block_v)),
            STAGES=config.num_stages,
            PDL=pdl,
            num_warps=config.num_warps,
            launch_pdl=pdl,
        )
    return out
