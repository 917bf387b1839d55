"""Depthwise causal convolution with SiLU and its state, for decodes and for packed prefill segments.

Reference: `kernels.conv1d` (`causal_conv_step`, `causal_conv_packed`). ``y[t] = silu(sum_j weight[j] · x[t − (kernel −
1) + j])`` per channel, summed in float32 (Gu and Dao's causal_conv1d). The state of a sequence is its last kernel − 1
inputs.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.elementary import silu
from kernels.gpu.launch.programmatic import prefetch_l2
from kernels.gpu.segments import TILE, Segments


class Decodes(NamedTuple):
    """The convolution of rows that are one token of a sequence each, as a kernel takes it."""

    state: Any
    """[num_slots, kernel - 1, channels]: the last inputs of each sequence."""
    weight: Any
    """[kernel, channels]."""
    slots: Any
    """[rows]."""
    channels: Any


@triton.jit
def conv_prefetch(conv, first, m, M, KERNEL: tl.constexpr, CHANNELS: tl.constexpr):
    """Asks L2 for what conv_ahead() loads of CHANNELS channels from ``first``. Not in the interpreter."""
    if first < conv.channels:
        line: tl.constexpr = 128 // (conv.state.dtype.element_ty.primitive_bitwidth // 8)
        channel = tl.minimum(first + tl.arange(0, max(1, CHANNELS // line)) * line, conv.channels - 1)
        slot = conv_slots(conv, m, M)
        for tap in tl.static_range(KERNEL):
            prefetch_l2(conv.weight + tap * conv.channels + channel)
            if tap < KERNEL - 1:
                row = conv.state + (slot * (KERNEL - 1) + tap)[:, None] * conv.channels
                prefetch_l2(row + channel[None, :])


@triton.jit
def conv_slots(conv, m, M):
    """State slots of rows m, for conv_ahead()."""
    return tl.load(conv.slots + m, mask=m < M, other=0).to(tl.int64)


@triton.jit
def conv_ahead(conv, slot, channel, inside, m, M, KERNEL: tl.constexpr):
    """Loads the old inputs and the taps, older than the step, of rows m in slots of conv_slots() and of the channels
    there are, for conv_step()."""
    here = inside & (channel < conv.channels)
    keep = (m < M)[:, None] & here[None, :]
    place = conv.state + slot[:, None] * ((KERNEL - 1) * conv.channels) + channel[None, :]
    window, taps = (), ()
    for tap in tl.static_range(KERNEL):
        if tap < KERNEL - 1:
            window = window + (tl.load(place + tap * conv.channels, mask=keep, other=0.0),)  # noqa: RUF005
        taps = taps + (tl.load(conv.weight + tap * conv.channels + channel, mask=here, other=0.0),)  # noqa: RUF005
    return place, keep, window, taps


@triton.jit
def conv_step(newest, ahead, conv, KERNEL: tl.constexpr):
    """silu of the sums, float32 [rows, channels], of the newest inputs (in the state's dtype) and the old ones of
    conv_ahead(); the state moves on."""
    place, keep, window, taps = ahead
    total = newest.to(tl.float32) * taps[KERNEL - 1].to(tl.float32)[None, :]
    for tap in tl.static_range(KERNEL - 1):
        total += window[tap].to(tl.float32) * taps[tap].to(tl.float32)[None, :]
    # Every thread has read its part of the state before any writes to it.
    tl.debug_barrier()
    for tap in tl.static_range(KERNEL - 2):
        tl.store(place + tap * conv.channels, window[tap + 1], mask=keep)
    tl.store(place + (KERNEL - 2) * conv.channels, newest, mask=keep)
    return silu(total, newest.dtype)


@triton.jit
def _conv_decode_kernel(
    x,
    conv,
    out,
    x_stride,
    out_stride,
    rows,
    KERNEL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows and BLOCK channels: 16 bytes a thread of each old input of each row are in flight at once."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < conv.channels
    if PDL:
        gdc_launch_dependents()
    ahead = conv_ahead(conv, conv_slots(conv, m, rows), channel, inside, m, rows, KERNEL)
    if PDL:
        gdc_wait()
    here = (m < rows)[:, None] & inside[None, :]
    place = m.to(tl.int64)[:, None] * x_stride + channel[None, :]
    newest = tl.load(x + place, mask=here, other=0.0)
    y = conv_step(newest, ahead, conv, KERNEL)
    place = m.to(tl.int64)[:, None] * out_stride + channel[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=here)


@triton.jit
def _conv_prefill_kernel(
    x,
    weight,
    state,
    begins,
    starts,
    slots,
    out_slots,
    links,
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
    """ROWS rows and BLOCK channels; a thread has its channels of all those rows, and reads each input once."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    part = tl.program_id(1)
    tile = part // (TILE_ROWS // ROWS)
    taps = ()
    for tap in tl.static_range(KERNEL):
        taps = taps + (tl.load(weight + tap * channels + channel, mask=inside, other=0.0),)  # noqa: RUF005
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
    count = tl.load(links + segment)
    # Rows before this one lie in the slot; those of a chain's other links lie in x, all that are looked back at.
    origin = tl.where(count > 0, begin, 0)
    history = state + tl.load(slots + segment).to(tl.int64) * (KERNEL - 1) * channels
    # All loads before the first store, which the compiler would not move them across.
    inputs = ()
    for source in tl.static_range(KERNEL - 1):
        row = first + (source - (KERNEL - 1))
        before = inside & (row < origin) & cached
        past = tl.load(history + (row - begin + (KERNEL - 1)) * channels + channel, mask=before, other=0.0)
        now = tl.load(x + row.to(tl.int64) * x_stride + channel, mask=inside & (row >= origin), other=0.0)
        inputs = inputs + (tl.where(row < origin, past, now),)  # noqa: RUF005
    for r in tl.static_range(ROWS):
        row = first + r
        now = tl.load(x + row.to(tl.int64) * x_stride + channel, mask=inside & (row < end), other=0.0)
        inputs = inputs + (now,)  # noqa: RUF005
    for r in tl.static_range(ROWS):
        row = first + r
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(KERNEL):
            total += inputs[r + tap].to(tl.float32) * taps[tap].to(tl.float32)
        y = silu(total, out.dtype.element_ty).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64) * out_stride + channel, y, mask=inside & (row < end))
    if (first == begin) & (count > 0):
        # Nobody but the program that reads the old state writes the new one, and only after it has read all it needs:
        # so it writes those behind a chain's other links too, the last of which may take the place of the old one.
        place = tl.arange(0, WINDOW)[:, None]
        kept = inside[None, :] & (place < KERNEL - 1)
        for link in tl.range(segment, segment + count, num_stages=1):
            kept_row = tl.load(begins + link + 1) - (KERNEL - 1) + place
            new = x + kept_row.to(tl.int64) * x_stride + channel[None, :]
            kept_now = tl.load(new, mask=kept & (kept_row >= begin), other=0.0)
            old = history + (kept_row - begin + (KERNEL - 1)) * channels + channel[None, :]
            kept_past = tl.load(old, mask=kept & (kept_row < begin) & cached, other=0.0)
            tl.debug_barrier()
            target = state + tl.load(out_slots + link).to(tl.int64) * (KERNEL - 1) * channels
            kept_here = tl.where(kept_row < begin, kept_past, kept_now)
            tl.store(target + place * channels + channel[None, :], kept_here, mask=kept)


def rows_of_program(rows: int) -> int:
    """Number of decodes that one program of conv_decode() takes out of ``rows``: with one each, 256 rows are 8,192
    programs of one warp, and an H200 took 23 µs for what it reads in 8."""
    return 1 if rows <= 32 else 2 if rows <= 96 else 4


def conv_decode(
    projected: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    *,
    out: Tensor | None = None,
    row_block: int = 0,
    block: int = 256,
    num_warps: int = 1,
    pdl: bool = False,
) -> Tensor:
    """Convolution of one token of each of B sequences; their states move on by one token, in place.

    Args:
        projected: [B, width ≥ conv_dim], the convolution's inputs in the first conv_dim columns; rows contiguous.
        weight: [kernel, conv_dim].
        state: [num_slots, kernel − 1, conv_dim], contiguous, in projected's dtype.
        slots: [B] int32. Rows may share only slot 0, whose contents nobody reads.
        out: [B, conv_dim], where to write.
        row_block, block, num_warps: rows (a power of two; 0: rows_of_program()), channels and warps of a program.
        pdl: launch before the kernels ahead have finished (kernels.gpu.launch.programmatic): none of them may write
            ``state`` or ``slots``.

    Returns:
        [B, conv_dim] in projected's dtype.

    Raises:
        ValueError: shapes do not fit.
    """
    kernel, channels = check_convolution(projected, weight, state)
    rows = slots.shape[0]
    if out is None:
        out = torch.empty(rows, channels, dtype=projected.dtype, device=projected.device)
    if rows:
        block = min(block, triton.next_power_of_2(channels))
        row_block = row_block or rows_of_program(rows)
        _conv_decode_kernel[(triton.cdiv(rows, row_block), triton.cdiv(channels, block))](
            projected,
            Decodes(state, weight, slots, channels),
            out,
            projected.stride(0),
            out.stride(0),
            rows,
            KERNEL=kernel,
            ROWS=row_block,
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
    num_warps: int = 2,
    pdl: bool = False,
) -> Tensor:
    """Packed segments: nothing leaks from one chain into the next; each goes on from the state of its slot and leaves
    those behind its links in their out_slots.

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
    kernel, channels = check_convolution(projected, weight, state)
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
            segments.links,
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


def check_convolution(projected: Tensor, weight: Tensor, state: Tensor) -> tuple[int, int]:
    """Kernel size and channels of a convolution; raises ValueError if the shapes do not fit."""
    kernel, channels = weight.shape
    if kernel < 2 or tuple(state.shape[1:]) != (kernel - 1, channels) or projected.shape[1] < channels:
        raise ValueError(
            f"convolution of weight {tuple(weight.shape)}: state must be [slots, {kernel - 1}, {channels}], got "
            f"{tuple(state.shape)}, and inputs at least {channels} wide, got {projected.shape[1]}"
        )
    if projected.stride(1) != 1 or not weight.is_contiguous() or not state.is_contiguous():
        raise ValueError("convolution: rows of the inputs, the weight and the state must be contiguous")
    return kernel, channels
