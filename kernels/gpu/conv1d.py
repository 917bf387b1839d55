"""Depthwise causal convolution with SiLU and its state, for decodes and for packed prefill segments.

Reference: `kernels.conv1d` (`causal_conv_step`, `causal_conv_packed`). ``y[t] = silu(sum_j weight[j] · x[t − (kernel −
1) + j])`` per channel, summed in float32 (Gu and Dao's causal_conv1d). The state of a sequence is its last kernel − 1
inputs.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.segments import TILE, Segments


@triton.jit
def _conv_decode_kernel(
    x,
    weight,
    state,
    slots,
    out,
    channels,
    x_stride,
    out_stride,
    KERNEL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    tap = tl.arange(0, WINDOW)[:, None]
    inside = channel < channels
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(slots + row).to(tl.int64)
    taps = tl.load(weight + tap * channels + channel, mask=inside & (tap < KERNEL), other=0.0)
    history = state + slot * (KERNEL - 1) * channels + channel
    window = tl.load(history + tap * channels, mask=inside & (tap < KERNEL - 1), other=0.0)
    if PDL:
        gdc_wait()
    newest = tl.load(x + row * x_stride + channel + tap * 0, mask=inside & (tap == KERNEL - 1), other=0.0)
    window = tl.where(tap == KERNEL - 1, newest, window)
    total = tl.sum(window.to(tl.float32) * taps.to(tl.float32), axis=0)
    # Every thread has read its part of the state before any writes to it.
    tl.debug_barrier()
    tl.store(history + (tap - 1) * channels, window, mask=inside & (tap > 0) & (tap < KERNEL))
    flat = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = total / (1.0 + tl.exp(-total))
    tl.store(out + row * out_stride + flat, y.to(out.dtype.element_ty), mask=flat < channels)


@triton.jit
def _conv_prefill_kernel(
    x,
    weight,
    state,
    begins,
    starts,
    slots,
    out_slots,
    tile_segment,
    tile_row,
    out,
    channels,
    x_stride,
    out_stride,
    KERNEL: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = channel < channels
    part = tl.program_id(1)
    tile = part // (TILE_ROWS // ROWS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    segment = tl.load(tile_segment + tile)
    if segment < 0:
        return
    begin = tl.load(begins + segment)
    end = tl.load(begins + segment + 1)
    first = tl.load(tile_row + tile) + part % (TILE_ROWS // ROWS) * ROWS
    if first >= end:
        return
    cached = tl.load(starts + segment) > 0
    row = first + tl.arange(0, ROWS)[:, None]
    history = state + tl.load(slots + segment).to(tl.int64) * (KERNEL - 1) * channels + channel
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for tap in tl.static_range(KERNEL):
        source = row + (tap - (KERNEL - 1))
        now = tl.load(
            x + source.to(tl.int64) * x_stride + channel, mask=inside & (source >= begin) & (row < end), other=0
        )
        value = now.to(tl.float32)
        if tap < KERNEL - 1:
            past = inside & (source < begin) & (row < end) & cached
            before = tl.load(history + (source - begin + (KERNEL - 1)) * channels, mask=past, other=0.0)
            value = tl.where(source < begin, before.to(tl.float32), value)
        total += value * tl.load(weight + tap * channels + channel, mask=inside, other=0.0).to(tl.float32)
    y = total / (1.0 + tl.exp(-total))
    tl.store(out + row.to(tl.int64) * out_stride + channel, y.to(out.dtype.element_ty), mask=inside & (row < end))
    if first == begin:
        # Nobody but the program that reads the old state writes the new one, and only after it has read all it needs.
        place = tl.arange(0, WINDOW)[:, None]
        origin = end - (KERNEL - 1) + place
        kept = inside & (place < KERNEL - 1)
        kept_now = tl.load(x + origin.to(tl.int64) * x_stride + channel, mask=kept & (origin >= begin), other=0.0)
        old = kept & (origin < begin) & cached
        kept_past = tl.load(history + (origin - begin + (KERNEL - 1)) * channels, mask=old, other=0.0)
        tl.debug_barrier()
        target = state + tl.load(out_slots + segment).to(tl.int64) * (KERNEL - 1) * channels + channel
        tl.store(target + place * channels, tl.where(origin < begin, kept_past, kept_now), mask=kept)


def conv_decode(
    projected: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    *,
    out: Tensor | None = None,
    block: int = 256,
    num_warps: int = 1,
    pdl: bool = False,
) -> Tensor:
    """One token of each of B sequences; their states move on by one token, in place.

    Args:
        projected: [B, width ≥ conv_dim], the convolution's inputs in the first conv_dim columns; rows contiguous.
        weight: [kernel, conv_dim].
        state: [num_slots, kernel − 1, conv_dim], contiguous, in projected's dtype.
        slots: [B] int32. Rows may share only slot 0, whose contents nobody reads.
        out: [B, conv_dim], where to write.
        block, num_warps: channels and warps of a program.
        pdl: launch before the kernels ahead have finished (kernels.gpu.ahead): none of them may write ``state`` or
            ``slots``.

    Returns:
        [B, conv_dim] in projected's dtype.

    Raises:
        ValueError: shapes do not fit.
    """
    kernel, channels = _check(projected, weight, state)
    rows = slots.shape[0]
    if out is None:
        out = torch.empty(rows, channels, dtype=projected.dtype, device=projected.device)
    if rows:
        block = min(block, triton.next_power_of_2(channels))
        _conv_decode_kernel[(rows, triton.cdiv(channels, block))](
            projected,
            weight,
            state,
            slots,
            out,
            channels,
            projected.stride(0),
            out.stride(0),
            KERNEL=kernel,
            WINDOW=triton.next_power_of_2(kernel),
            BLOCK=block,
            PDL=pdl,
            num_warps=num_warps,
            launch_pdl=pdl,
        )
    return out


def conv_prefill(
    projected: Tensor,
    weight: Tensor,
    state: Tensor,
    segments: Segments,
    *,
    out: Tensor | None = None,
    rows: int = 16,
    block: int = 256,
    num_warps: int = 4,
    pdl: bool = False,
) -> Tensor:
    """Packed segments: nothing leaks from one into the next; each goes on from the state of its slot and leaves its new
    one in its out_slot.

    Args:
        projected: [T, width ≥ conv_dim], the whole flat batch; rows contiguous.
        weight: [kernel, conv_dim].
        state: [num_slots, kernel − 1, conv_dim], contiguous. Read as zeros where a segment starts at 0.
        segments: where the sequences lie.
        out: [T, conv_dim], where to write; rows outside the segments stay as they are.
        rows, block, num_warps: rows (a power of two up to TILE), channels and warps of a program.
        pdl: launch before the kernel ahead has finished (programmatic dependent launch).

    Returns:
        [T, conv_dim] in projected's dtype; rows outside the segments are undefined.

    Raises:
        ValueError: shapes do not fit.
    """
    kernel, channels = _check(projected, weight, state)
    if out is None:
        out = torch.empty(projected.shape[0], channels, dtype=projected.dtype, device=projected.device)
    if segments.max_tiles:
        block = min(block, triton.next_power_of_2(channels))
        _conv_prefill_kernel[(triton.cdiv(channels, block), segments.max_tiles * (TILE // rows))](
            projected,
            weight,
            state,
            segments.begin,
            segments.start,
            segments.slot,
            segments.out_slot,
            segments.tile_segment,
            segments.tile_row,
            out,
            channels,
            projected.stride(0),
            out.stride(0),
            KERNEL=kernel,
            WINDOW=triton.next_power_of_2(kernel),
            ROWS=rows,
            BLOCK=block,
            TILE_ROWS=TILE,
            PDL=pdl,
            num_warps=num_warps,
            launch_pdl=pdl,
        )
    return out


def _check(projected: Tensor, weight: Tensor, state: Tensor) -> tuple[int, int]:
    kernel, channels = weight.shape
    if kernel < 2 or tuple(state.shape[1:]) != (kernel - 1, channels) or projected.shape[1] < channels:
        raise ValueError(
            f"convolution of weight {tuple(weight.shape)}: state must be [slots, {kernel - 1}, {channels}], got "
            f"{tuple(state.shape)}, and inputs at least {channels} wide, got {projected.shape[1]}"
        )
    if projected.stride(1) != 1 or not weight.is_contiguous() or not state.is_contiguous():
        raise ValueError("convolution: rows of the inputs, the weight and the state must be contiguous")
    return kernel, channels
