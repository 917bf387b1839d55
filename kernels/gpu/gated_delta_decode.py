"""A DeltaNet mixer's whole decode step in one kernel: convolution, gates, L2 norms, recurrence and gated RMSNorm.

Reference: `kernels.conv1d.causal_conv_step`, then what `gated_delta_step` names. Same results as `conv_decode` followed
by `gated_delta_step`, which it saves a kernel. The value heads of one key head all need its query and key channels,
and no program may move their convolution state on before the others have read it: whoever reads it last does.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803, N806
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.delta_shape import DeltaShape
from kernels.gpu.gated_delta_step import StepConfig, advance, choose, log_decay, sigmoid


@triton.jit
def _window(history, channel, some, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, WINDOW: tl.constexpr):
    """The inputs before this one, [WINDOW, channels], oldest first; the last of KERNEL rows is still missing."""
    tap = tl.arange(0, WINDOW)[:, None]
    return tl.load(history + tap * CHANNELS + channel[None, :], mask=some[None, :] & (tap < KERNEL - 1), other=0.0)


@triton.jit
def _convolve(window, x, weight, channel, some, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, WINDOW: tl.constexpr):
    """The complete window, and silu of its sum by taps as float32 that the model's type can hold."""
    tap = tl.arange(0, WINDOW)[:, None]
    inside = some[None, :] & (tap < KERNEL)
    newest = tl.load(x + channel[None, :] + tap * 0, mask=inside & (tap == KERNEL - 1), other=0.0)
    window = tl.where(tap == KERNEL - 1, newest, window)
    taps = tl.load(weight + tap * CHANNELS + channel[None, :], mask=inside, other=0.0)
    total = tl.sum(window.to(tl.float32) * taps.to(tl.float32), axis=0)
    return window, (total * sigmoid(total)).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _move_on(history, window, channel, some, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, WINDOW: tl.constexpr):
    tap = tl.arange(0, WINDOW)[:, None]
    tl.store(history + (tap - 1) * CHANNELS + channel[None, :], window, mask=some[None, :] & (tap > 0) & (tap < KERNEL))


@triton.jit
def _gated_delta_decode_kernel(
    projected,
    conv_weight,
    conv_state,
    readers,
    negative_a,
    dt_bias,
    norm_weight,
    state,
    slots,
    out,
    eps,
    scale,
    projected_stride,
    out_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KERNEL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    key_head = head // (HEADS // KEY_HEADS)
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    # Neither slots nor states are written by the kernel ahead: they are on their way before that one has finished.
    slot = tl.load(slots + row).to(tl.int64)
    places = state + ((slot * HEADS + head) * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
    held = i[:, None] < KEY_DIM
    if BLOCKS == 1:
        s = tl.load(places, mask=held & (j[None, :] < VALUE_DIM), other=0.0).to(tl.float32)
    history = conv_state + slot * (KERNEL - 1) * CHANNELS
    queries = key_head * KEY_DIM + i
    keys = queries + KEY_HEADS * KEY_DIM
    column = tl.arange(0, BLOCKS * BLOCK_V)
    inside = column < VALUE_DIM
    values = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
    q_window = _window(history, queries, i < KEY_DIM, CHANNELS, KERNEL, WINDOW)
    k_window = _window(history, keys, i < KEY_DIM, CHANNELS, KERNEL, WINDOW)
    v_window = _window(history, values, inside, CHANNELS, KERNEL, WINDOW)
    rate = tl.load(negative_a + head)
    bias = tl.load(dt_bias + head)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = projected + row * projected_stride
    q_window, q = _convolve(q_window, x, conv_weight, queries, i < KEY_DIM, CHANNELS, KERNEL, WINDOW)
    k_window, k = _convolve(k_window, x, conv_weight, keys, i < KEY_DIM, CHANNELS, KERNEL, WINDOW)
    v_window, v_all = _convolve(v_window, x, conv_weight, values, inside, CHANNELS, KERNEL, WINDOW)
    gates = x + CHANNELS
    beta = sigmoid(tl.load(gates + HEADS * VALUE_DIM + head).to(tl.float32))
    a = tl.load(gates + HEADS * VALUE_DIM + HEADS + head).to(tl.float32)
    decay = tl.exp(log_decay(a, rate, bias))
    k_norm = 1.0 / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
    q_norm = scale / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6)
    overlap = tl.sum(q * k, axis=0)

    # All threads have read the convolution's state. The count of a key head's readers is left at zero.
    tl.debug_barrier()
    _move_on(history, v_window, values, inside, CHANNELS, KERNEL, WINDOW)
    counter = readers + row * KEY_HEADS + key_head
    if tl.atomic_add(counter, 1, sem="acq_rel") == HEADS // KEY_HEADS - 1:
        _move_on(history, q_window, queries, i < KEY_DIM, CHANNELS, KERNEL, WINDOW)
        _move_on(history, k_window, keys, i < KEY_DIM, CHANNELS, KERNEL, WINDOW)
        tl.store(counter, 0)

    if BLOCKS == 1:
        new, o = advance(s, q, k, v_all, q_norm, k_norm, overlap, decay, beta)
        tl.store(places, new.to(state.dtype.element_ty), mask=held & (j[None, :] < VALUE_DIM))
    else:
        which = tl.arange(0, BLOCKS)[:, None]
        v_blocks = tl.reshape(v_all, [BLOCKS, BLOCK_V])
        o_blocks = tl.zeros([BLOCKS, BLOCK_V], tl.float32)
        for block in tl.range(BLOCKS, num_stages=STAGES):
            here = block * BLOCK_V
            some = held & (j[None, :] + here < VALUE_DIM)
            s = tl.load(places + here, mask=some, other=0.0).to(tl.float32)
            v = tl.sum(tl.where(which == block, v_blocks, 0.0), axis=0)
            new, part = advance(s, q, k, v, q_norm, k_norm, overlap, decay, beta)
            tl.store(places + here, new.to(state.dtype.element_ty), mask=some)
            o_blocks = tl.where(which == block, part[None, :], o_blocks)
        o = tl.reshape(o_blocks, [BLOCKS * BLOCK_V])
    z = tl.load(gates + head * VALUE_DIM + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + column, mask=inside, other=0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(o * o, axis=0) / VALUE_DIM + eps)
    y = o * inverse * weight * (z * sigmoid(z))
    tl.store(out + row * out_stride + head * VALUE_DIM + column, y.to(out.dtype.element_ty), mask=inside)


def gated_delta_decode(
    projected: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    readers: Tensor,
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
    """One token of each of B sequences; both of their states move on in place.

    Args:
        projected: [B, conv_dim + value_size + 2 · value_heads], the mixer's projections: qkv | z | b | a.
        conv_weight: [kernel, conv_dim].
        conv_state: [num_slots, kernel − 1, conv_dim], contiguous, in projected's dtype.
        readers: [≥ B, key_heads] int32, contiguous, zeros; zeros again afterwards. Launches that may run at the same
            time need one each.
        negative_a, dt_bias, norm_weight, eps, state, slots, out, config: as of gated_delta_step().
        pdl: launch before the kernel ahead has finished (programmatic dependent launch). States and ``slots`` are then
            read early: the kernel ahead must not be the one that writes them.

    Returns:
        [B, value_size] in projected's dtype: rms_norm(o) · silu(z).

    Raises:
        ValueError: shapes do not fit.
    """
    kernel, channels = conv_weight.shape
    shape = DeltaShape.of(projected[:, :channels], projected, state)
    rows = slots.shape[0]
    if tuple(conv_state.shape[1:]) != (kernel - 1, channels) or not conv_state.is_contiguous():
        raise ValueError(f"conv_state must be [slots, {kernel - 1}, {channels}], contiguous: {tuple(conv_state.shape)}")
    if readers.shape[0] < rows or readers.shape[1] != shape.key_heads or not readers.is_contiguous():
        raise ValueError(f"readers must be [at least {rows}, {shape.key_heads}], contiguous: {tuple(readers.shape)}")
    if out is None:
        out = torch.empty(rows, shape.value_size, dtype=projected.dtype, device=projected.device)
    if rows:
        if config is None:
            config = choose(rows)
        block_v = min(config.block_v, triton.next_power_of_2(shape.value_dim))
        _gated_delta_decode_kernel[(shape.value_heads, rows)](
            projected,
            conv_weight,
            conv_state,
            readers,
            negative_a,
            dt_bias,
            norm_weight,
            state,
            slots,
            out,
            eps,
            shape.key_dim**-0.5,
            projected.stride(0),
            out.stride(0),
            KEY_HEADS=shape.key_heads,
            HEADS=shape.value_heads,
            KEY_DIM=shape.key_dim,
            VALUE_DIM=shape.value_dim,
            KERNEL=kernel,
            WINDOW=triton.next_power_of_2(kernel),
            BLOCK_K=triton.next_power_of_2(shape.key_dim),
            BLOCK_V=block_v,
            BLOCKS=triton.next_power_of_2(triton.cdiv(shape.value_dim, block_v)),
            STAGES=config.num_stages,
            PDL=pdl,
            num_warps=config.num_warps,
            launch_pdl=pdl,
        )
    return out
