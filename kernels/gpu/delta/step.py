"""Decode step of the gated delta rule, one token a sequence: gates, L2 norms, recurrence and gated RMSNorm in one pass
over the state.

Reference: `kernels.gated_delta.recurrent_gated_delta` with `gates`, and `kernels.rms_norm.{l2_normalize,
gated_rms_norm}`. Formula: Yang et al., Gated Delta Networks, arXiv 2412.06464, eq. 10. With `waiting_writes` the pass
reads a state and writes it back only every few steps.
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

from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.delta.waiting_writes import (
    NONE,
    WaitingWrites,
    add_pairs,
    none_waits,
    products_of_writes,
    put_write,
    set_span,
    settled,
    span_of,
)
from kernels.gpu.elementary import exponential, inverse_root, sigmoid, silu, softplus
from kernels.gpu.launch.device import DeviceLimits, limits_of

_HOPPER = (9, 0)
"""Compute capability."""
_MANY_ROWS = 64
"""Number of rows from which on programs that start early are in the way of those that work: inside a step on an H200 a
launch of 256 rows takes 306 µs with and 293 without programmatic launch; of 128 rows it is 2 µs, of 64 a few tenths."""


LATE_ROWS = 48
"""Number of rows from which on writes wait. A step of fewer rows waits for programs rather than for bytes, and those
that hold a whole state have it before the kernel ahead is done: inside a step on an H200 16, 32, 48, 64 rows take
3,238, 3,920, 4,577, 5,035 µs written back at once and 3,517, 3,957, 4,470, 4,690 late; 256 rows 12,480 and 10,468."""


class Mixer(NamedTuple):
    """Arguments of the rule as kernels take them: inputs, state and output; see gated_delta_step."""

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
    return negative_a * softplus(a + dt_bias)


@triton.jit
def _add_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f


class Inputs(NamedTuple):
    """Inputs of one token to a head, as loaded."""

    q: Any
    k: Any
    v: Any
    z: Any
    b: Any
    a: Any
    negative_a: Any
    dt_bias: Any
    norm_weight: Any


class Token(NamedTuple):
    """Values computed from the inputs, float32; the norms of q and k are factors of results."""

    q: Any
    k: Any
    v: Any
    log_decay: Any
    beta: Any
    q_norm: Any
    k_norm: Any
    qk: Any
    gate: Any
    """Gate of the output, multiplied by the norm's weight."""


@triton.jit
def load_query_key(row, head, i, mixer, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr):
    """The key dimensions i of a head's query and key."""
    key_head = head // (HEADS // KEY_HEADS)
    vector = mixer.mixed + row * mixer.mixed_stride + key_head * KEY_DIM + i
    q = tl.load(vector, mask=i < KEY_DIM, other=0.0)
    return q, tl.load(vector + KEY_HEADS * KEY_DIM, mask=i < KEY_DIM, other=0.0)


@triton.jit
def load_inputs(
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
    """Values of the dimensions j."""
    inside = j < VALUE_DIM
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    q, k = load_query_key(row, head, tl.arange(0, BLOCK_K), mixer, KEY_HEADS, HEADS, KEY_DIM)
    value = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j
    v = tl.load(mixer.mixed + row * mixer.mixed_stride + value, mask=inside, other=0.0)
    rest = mixer.projected + row * mixer.projected_stride + channels
    z = tl.load(rest + head * VALUE_DIM + j, mask=inside, other=0.0)
    gates = rest + HEADS * VALUE_DIM + head
    return Inputs(
        q,
        k,
        v,
        z,
        tl.load(gates),
        tl.load(gates + HEADS),
        tl.load(mixer.negative_a + head),
        tl.load(mixer.dt_bias + head),
        tl.load(mixer.norm_weight + j, mask=inside, other=0.0),
    )


@triton.jit
def prepared(inputs):
    q, k, z = inputs.q.to(tl.float32), inputs.k.to(tl.float32), inputs.z.to(tl.float32)
    g = log_decay(inputs.a.to(tl.float32), inputs.negative_a, inputs.dt_bias)
    qq, kk, qk = tl.reduce((q * q, k * k, q * k), 0, _add_triples)
    return Token(
        q,
        k,
        inputs.v.to(tl.float32),
        g,
        sigmoid(inputs.b.to(tl.float32)),
        inverse_root(qq + 1e-6),
        inverse_root(kk + 1e-6),
        qk,
        inputs.norm_weight * silu(z, inputs.z.dtype),
    )


@triton.jit
def write_and_output(token, read, o, scale):
    """Change of the state by the token, k ⊗ δ, and its output, from Sᵀk and Sᵀq of the old state: o = exp(g) Sᵀq +
    (k·q) δ needs no second look at the new one, so that no sum waits for another."""
    decay = exponential(token.log_decay)
    delta = token.k_norm * token.beta * (token.v - decay * token.k_norm * read)
    return delta, scale * token.q_norm * (decay * o + token.qk * delta)


@triton.jit
def advance(s, token, scale):
    """The new state and the output, float32."""
    read, o = tl.reduce((s * token.k[:, None], s * token.q[:, None]), 0, add_pairs)
    delta, o = write_and_output(token, read, o, scale)
    return exponential(token.log_decay) * s + token.k[:, None] * delta[None, :], o


@triton.jit
def store_normed(o, token, row, head, j, mixer, VALUE_DIM: tl.constexpr):
    """The gated norm of a head's output, [value dimensions] float32."""
    y = o * inverse_root(tl.sum(o * o) / VALUE_DIM + mixer.eps) * token.gate
    place = mixer.out + row * mixer.out_stride + head * VALUE_DIM + j
    tl.store(place, y.to(mixer.out.dtype.element_ty), mask=j < VALUE_DIM)


@triton.jit
def _gated_delta_step_kernel(
    mixer,
    state,
    slots,
    waiting,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """States are written back, with whatever has waited."""
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    if PDL:
        gdc_launch_dependents()
    # The state is on its way before the kernels ahead are done.
    place = tl.load(slots + row).to(tl.int64) * HEADS + head
    if ROOM > 0:
        first, end = span_of(waiting, place, 0, VALUE_DIM)
    s = load_state(state, place, i, j, KEY_DIM, VALUE_DIM)
    if ROOM > 0:
        s = settled(s, waiting, place, first, end, i, j, KEY_DIM, VALUE_DIM, ROOM)
    if PDL:
        gdc_wait()
    inputs = load_inputs(row, head, j, mixer, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, BLOCK_K)
    token = prepared(inputs)
    s, o = advance(s, token, mixer.scale)
    store_state(s, state, place, i, j, KEY_DIM, VALUE_DIM)
    store_normed(o, token, row, head, j, mixer, VALUE_DIM)
    if (ROOM > 0) and (end > first):
        none_waits(waiting, place, head, j, VALUE_DIM, ROOM)


@triton.jit
def _late_step_kernel(
    mixer,
    state,
    slots,
    waiting,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes wait, and states whose room is taken are written back before one more does.

    A warp has a head, so that nothing is summed over warps, and goes through its state in parts: many such programs
    share a multiprocessor, and while some wait for memory others compute.
    """
    i = tl.arange(0, PART)
    j = tl.arange(0, BLOCK_V)
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    if PDL:
        gdc_launch_dependents()
    place = tl.load(slots + row).to(tl.int64) * HEADS + head
    first, end = span_of(waiting, place, 0, VALUE_DIM)
    if PDL:
        gdc_wait()
    inputs = load_inputs(row, head, j, mixer, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, BLOCK_K)
    token = prepared(inputs)
    read, o = tl.zeros([BLOCK_V], tl.float32), tl.zeros([BLOCK_V], tl.float32)
    if end == ROOM:
        for part in tl.range(BLOCK_K // PART):
            here = part * PART + i
            s = load_state(state, place, here, j, KEY_DIM, VALUE_DIM)
            s = settled(s, waiting, place, first, end, here, j, KEY_DIM, VALUE_DIM, ROOM)
            store_state(s, state, place, here, j, KEY_DIM, VALUE_DIM)
            read, o = _add_products(read, o, s, row, head, here, mixer, KEY_HEADS, HEADS, KEY_DIM)
        first, end = 0, 0
    else:
        faded, written_read, written_o = products_of_writes(
            waiting, place, first, end, j, token.k, token.q, KEY_DIM, VALUE_DIM, ROOM, BLOCK_K, BLOCK_W
        )
        for part in tl.static_range(BLOCK_K // PART):
            here = part * PART + i
            s = load_state(state, place, here, j, KEY_DIM, VALUE_DIM)
            read, o = _add_products(read, o, s, row, head, here, mixer, KEY_HEADS, HEADS, KEY_DIM)
        read = faded * read + written_read
        o = faded * o + written_o
    delta, o = write_and_output(token, read, o, mixer.scale)
    put_write(waiting, place, end, token, delta, j, KEY_DIM, VALUE_DIM, ROOM, BLOCK_K)
    set_span(waiting, place, j, first, end + 1, VALUE_DIM)
    store_normed(o, token, row, head, j, mixer, VALUE_DIM)


@triton.jit
def _add_products(read, o, s, row, head, i, mixer, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr):
    """Adds the products of the key dimensions i of a state with the token's key and query."""
    q, k = load_query_key(row, head, i, mixer, KEY_HEADS, HEADS, KEY_DIM)
    more, other = tl.reduce((s * k.to(tl.float32)[:, None], s * q.to(tl.float32)[:, None]), 0, add_pairs)
    return read + more, o + other


@triton.jit
def load_state(state, place, i, j, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """[i, j] of a head's state, float32. It passes through the L2 cache without pushing weights out."""
    places = state + (place * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
    held = (i[:, None] < KEY_DIM) & (j[None, :] < VALUE_DIM)
    return tl.load(places, mask=held, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def store_state(s, state, place, i, j, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    places = state + (place * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
    held = (i[:, None] < KEY_DIM) & (j[None, :] < VALUE_DIM)
    tl.store(places, s.to(state.dtype.element_ty), mask=held, eviction_policy="evict_first")


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
    """Argument and constants that launches of this kernel and of gated_delta_verify have in common."""
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
    waiting: WaitingWrites | None = None,
    late: bool | None = None,
    out: Tensor | None = None,
    num_warps: int = 4,
    part: int | None = None,
    device: DeviceLimits | None = None,
    pdl: bool = False,
) -> Tensor:
    """Gated delta rule of one token of each of B sequences; their states move on in place, each element read and
    written once, or with ``waiting`` read once and written every ``waiting.room`` tokens.

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
        waiting: writes of the same slots that are not in ``state`` yet; they move on with it.
        late: let writes wait; False: states are written back in this step, as they are without ``waiting``; None: by
            the number of rows.
        out: [B, value_size], where to write.
        num_warps: of a program that writes its state back. 4 was the fastest on an H200 at 1 to 256 rows, also beside
            programs that stay and stream blocks of states through shared memory, and beside programs of 168 registers,
            of which three instead of two share a multiprocessor.
        part: key dimensions that a program whose write waits has in registers at once, a power of two; if None what
            spills no registers: 32 on Hopper and of bfloat16 states before it, else 16.
        device: limits to choose the part for; those of the tensors' device if None.
        pdl: launch before the kernels ahead have finished (kernels.gpu.launch.programmatic): none of them may write
            ``state``, ``waiting`` or ``slots``.

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
    if not rows:
        return out
    mixer, constants = launch_parts(mixed, projected, negative_a, dt_bias, norm_weight, eps, out, shape, pdl)
    grid = (rows * shape.value_heads,)
    if waiting is None:
        _gated_delta_step_kernel[grid](mixer, state, slots, NONE, ROOM=0, **constants, num_warps=num_warps)
        return out
    room, writes = waiting.room, waiting.arguments(state)
    if late is None:
        late = rows >= LATE_ROWS
    if not late:
        _gated_delta_step_kernel[grid](mixer, state, slots, writes, ROOM=room, **constants, num_warps=num_warps)
        return out
    if part is None:
        capability = (device or limits_of(mixed.device)).capability
        part = 32 if capability == _HOPPER or (state.dtype == torch.bfloat16 and capability < _HOPPER) else 16
    _late_step_kernel[grid](
        mixer,
        state,
        slots,
        writes,
        PART=min(part, constants["BLOCK_K"]),
        ROOM=room,
        BLOCK_W=triton.next_power_of_2(room),
        **constants,
        num_warps=1,
    )
    return out
