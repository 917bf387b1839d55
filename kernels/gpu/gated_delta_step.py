"""One token of the gated delta rule: gates, L2 norms, recurrence and gated RMSNorm in one pass over the state.

Reference: `kernels.gated_delta.recurrent_gated_delta` with `gates`, and `kernels.rms_norm.{l2_normalize,
gated_rms_norm}`. Formula: Yang et al., Gated Delta Networks, arXiv 2412.06464, eq. 10.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.delta_shape import DeltaShape

_MANY_ROWS = 64
"""From here on programs that start early are in the way of those that work: inside a step on an H200 a launch of 256
rows takes 306 µs with and 293 without programmatic launch; of 128 rows it is 2 µs, of 64 a few tenths."""


class Mixer(NamedTuple):
    """What the rule is computed from and where its results go, as kernels take it; see gated_delta_step."""

    mixed: Any
    mixed_stride: Any
    projected: Any
    projected_stride: Any
    negative_a: Any
    dt_bias: Any
    norm_weight: Any
    eps: Any
    scale: Any
    out: Any
    out_stride: Any


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
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def advance(
    s,
    row,
    head,
    j,
    mixer,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The new state and the output of the value dimensions j of a head, float32."""
    key_head = head // (HEADS // KEY_HEADS)
    i = tl.arange(0, BLOCK_K)
    vector = mixer.mixed + row * mixer.mixed_stride + key_head * KEY_DIM + i
    q = tl.load(vector, mask=i < KEY_DIM, other=0.0).to(tl.float32)
    k = tl.load(vector + KEY_HEADS * KEY_DIM, mask=i < KEY_DIM, other=0.0).to(tl.float32)
    value = mixer.mixed + row * mixer.mixed_stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j
    v = tl.load(value, mask=j < VALUE_DIM, other=0.0).to(tl.float32)
    gates = mixer.projected + row * mixer.projected_stride + 2 * KEY_HEADS * KEY_DIM + 2 * HEADS * VALUE_DIM + head
    b = tl.load(gates).to(tl.float32)
    a = tl.load(gates + HEADS).to(tl.float32)
    decay = tl.exp(log_decay(a, tl.load(mixer.negative_a + head), tl.load(mixer.dt_bias + head)))
    # The norms of q and k are factors of the results, and Sᵀk and Sᵀq are of the old state (o = exp(g) Sᵀq + (k·q) δ
    # needs no second look at the new one), so that no sum waits for another.
    qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, _add_triples)
    read, o = tl.reduce((s * k[:, None], s * q[:, None]), 0, _add_pairs)
    k_norm = tl.rsqrt(kk + 1e-6)
    delta = k_norm * sigmoid(b) * (v - decay * k_norm * read)
    return decay * s + k[:, None] * delta[None, :], mixer.scale * tl.rsqrt(qq + 1e-6) * (decay * o + qk * delta)


@triton.jit
def store_normed(
    o,
    row,
    head,
    j,
    mixer,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """The gated norm of a head's output, [value dimensions] float32."""
    inside = j < VALUE_DIM
    gate = (
        mixer.projected
        + row * mixer.projected_stride
        + 2 * KEY_HEADS * KEY_DIM
        + HEADS * VALUE_DIM
        + head * VALUE_DIM
        + j
    )
    z = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(mixer.norm_weight + j, mask=inside, other=0.0)
    y = o * tl.rsqrt(tl.sum(o * o) / VALUE_DIM + mixer.eps) * weight * (z * sigmoid(z))
    tl.store(mixer.out + row * mixer.out_stride + head * VALUE_DIM + j, y.to(mixer.out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_delta_step_kernel(
    mixer,
    state,
    slots,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.arange(0, BLOCK_K)[:, None]
    j = tl.arange(0, BLOCK_V)
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    if PDL:
        gdc_launch_dependents()
    # The state is on its way before the kernels ahead are done. It passes through the L2 cache without pushing weights
    # out.
    slot = tl.load(slots + row).to(tl.int64)
    places = state + ((slot * HEADS + head) * KEY_DIM + i) * VALUE_DIM + j[None, :]
    held = (i < KEY_DIM) & (j[None, :] < VALUE_DIM)
    s = tl.load(places, mask=held, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if PDL:
        gdc_wait()
    s, o = advance(s, row, head, j, mixer, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, BLOCK_K)
    tl.store(places, s.to(state.dtype.element_ty), mask=held, eviction_policy="evict_first")
    store_normed(o, row, head, j, mixer, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM)


def launch_parts(
    mixed: Tensor,
    projected: Tensor,
    negative_a: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    out: Tensor,
    shape: DeltaShape,
    pdl: bool,
) -> tuple[Mixer, dict[str, Any]]:
    """What a launch of this kernel and one of gated_delta_verify have in common: an argument, and constants."""
    mixer = Mixer(
        mixed=mixed,
        mixed_stride=mixed.stride(0),
        projected=projected,
        projected_stride=projected.stride(0),
        negative_a=negative_a,
        dt_bias=dt_bias,
        norm_weight=norm_weight,
        eps=eps,
        scale=shape.key_dim**-0.5,
        out=out,
        out_stride=out.stride(0),
    )
    constants = {
        "KEY_HEADS": shape.key_heads,
        "HEADS": shape.value_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "BLOCK_K": triton.next_power_of_2(shape.key_dim),
        "BLOCK_V": triton.next_power_of_2(shape.value_dim),
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    return mixer, constants


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
    num_warps: int = 4,
    pdl: bool = False,
) -> Tensor:
    """One token of each of B sequences; their states move on in place, each element read and written once.

    All arithmetic is float32.

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
        num_warps: of a program, which computes one head of one row. 4 was the fastest on an H200 at 1 to 256 rows, also
            beside programs that stay and stream blocks of states through shared memory, and beside programs of 168
            registers, of which three instead of two share a multiprocessor.
        pdl: launch before the kernels ahead have finished (kernels.gpu.ahead): none of them may write ``state`` or
            ``slots``.

    Returns:
        [B, value_size] in mixed's dtype: rms_norm(o) · silu(z).

    Raises:
        ValueError: shapes do not fit.
    """
    shape = DeltaShape.of(mixed, projected, state)
    rows = slots.shape[0]
    pdl = pdl and rows < _MANY_ROWS
    if out is None:
        out = torch.empty(rows, shape.value_size, dtype=mixed.dtype, device=mixed.device)
    if rows:
        mixer, constants = launch_parts(mixed, projected, negative_a, dt_bias, norm_weight, eps, out, shape, pdl)
        _gated_delta_step_kernel[(rows * shape.value_heads,)](mixer, state, slots, **constants, num_warps=num_warps)
    return out
