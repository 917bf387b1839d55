"""The convolution of a few tokens of each of several sequences, of which only the first ones may count.

Reference: `kernels.conv1d.causal_conv_step`, one token after the other, bit for bit as `conv_decode`. The state of a
sequence, its last inputs, stays as it is; the new inputs are kept, and once it is known how many tokens count
`move_windows` moves the states of all layers on by as many.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,var-annotated"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.delta.conv1d import Decodes, check_convolution
from kernels.gpu.elementary import silu


@triton.jit
def _conv_verify_kernel(
    x,
    conv,
    kept,
    out,
    x_stride,
    out_stride,
    KERNEL: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin = tl.program_id(0) * GROUP
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < conv.channels
    if PDL:
        gdc_launch_dependents()
    place = conv.state + tl.load(conv.slots + begin).to(tl.int64) * ((KERNEL - 1) * conv.channels) + channel
    inputs, taps = (), ()
    for tap in tl.static_range(KERNEL):
        if tap < KERNEL - 1:
            inputs = inputs + (tl.load(place + tap * conv.channels, mask=inside, other=0.0),)  # noqa: RUF005
        taps = taps + (tl.load(conv.weight + tap * conv.channels + channel, mask=inside, other=0.0),)  # noqa: RUF005
    if PDL:
        gdc_wait()
    for index in tl.static_range(GROUP):
        row = (begin + index).to(tl.int64)
        newest = tl.load(x + row * x_stride + channel, mask=inside, other=0.0)
        tl.store(kept + row * conv.channels + channel, newest, mask=inside)
        inputs = inputs + (newest,)  # noqa: RUF005
    for index in tl.static_range(GROUP):
        row = (begin + index).to(tl.int64)
        total = inputs[index + KERNEL - 1].to(tl.float32) * taps[KERNEL - 1].to(tl.float32)
        for tap in tl.static_range(KERNEL - 1):
            total += inputs[index + tap].to(tl.float32) * taps[tap].to(tl.float32)
        y = silu(total, inputs[0].dtype)
        tl.store(out + row * out_stride + channel, y.to(out.dtype.element_ty), mask=inside)


def conv_verify(
    projected: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    kept: Tensor,
    group: int,
    *,
    out: Tensor | None = None,
    block: int = 256,
    num_warps: int = 1,
    pdl: bool = False,
) -> Tensor:
    """Convolution of ``group`` tokens of each of B sequences; no state changes.

    Args:
        projected: [B · group, width ≥ conv_dim], the inputs in the first conv_dim columns; rows contiguous.
        weight: [kernel, conv_dim].
        state: [num_slots, kernel − 1, conv_dim], contiguous, in projected's dtype.
        slots: [B · group] int32; only the first one of a group counts.
        kept: [≥ B · group, conv_dim], contiguous, gets the inputs for move_windows().
        out: [B · group, conv_dim], where to write.
        block, num_warps: channels and warps of a program, which has one sequence.
        pdl: launch before the kernels ahead have finished (kernels.gpu.launch.programmatic): none of them may write
            ``state`` or ``slots``.

    Returns:
        [B · group, conv_dim] in projected's dtype.

    Raises:
        ValueError: shapes do not fit.
    """
    kernel, channels = check_convolution(projected, weight, state)
    rows = slots.shape[0]
    if rows % group or kept.shape[0] < rows or kept.shape[1] != channels or not kept.is_contiguous():
        raise ValueError(f"convolution of {rows} rows in groups of {group}: their inputs go to {tuple(kept.shape)}")
    if out is None:
        out = torch.empty(rows, channels, dtype=projected.dtype, device=projected.device)
    if rows:
        block = min(block, triton.next_power_of_2(channels))
        _conv_verify_kernel[(rows // group, triton.cdiv(channels, block))](
            projected,
            Decodes(state, weight, slots, channels),
            kept,
            out,
            projected.stride(0),
            out.stride(0),
            KERNEL=kernel,
            GROUP=group,
            BLOCK=block,
            PDL=pdl,
            num_warps=num_warps,
            launch_pdl=pdl,
        )
    return out


@triton.jit
def _move_windows_kernel(
    state,
    kept,
    slots,
    rejected,
    channels,
    state_stride,
    kept_stride,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    slot = tl.load(slots + sequence * GROUP).to(tl.int64)
    if slot == 0:
        return
    count = -tl.load(rejected + sequence)
    for index in tl.static_range(GROUP):
        count += (tl.load(slots + sequence * GROUP + index) > 0).to(tl.int32)
    old = state + layer * state_stride + slot * (WINDOW * channels) + channel
    new = kept + layer * kept_stride + sequence.to(tl.int64) * (GROUP * channels) + channel
    window = ()
    for place in tl.static_range(WINDOW):
        source = place + count
        before = tl.load(old + source * channels, mask=inside & (source < WINDOW), other=0.0)
        now = tl.load(new + (source - WINDOW) * channels, mask=inside & (source >= WINDOW), other=0.0)
        window = window + (tl.where(source < WINDOW, before, now),)  # noqa: RUF005
    # Every thread has its channels alone: what it has read it may write.
    for place in tl.static_range(WINDOW):
        tl.store(old + place * channels, window[place], mask=inside)


def move_windows(
    state: Tensor, kept: Tensor, slots: Tensor, rejected: Tensor, group: int, *, block: int = 512, num_warps: int = 2
) -> None:
    """Moves the convolution's states of all layers on by the tokens that count.

    Args:
        state: [layers, num_slots, kernel − 1, conv_dim], contiguous.
        kept: [layers, rows, conv_dim], contiguous: of conv_verify().
        slots: [B · group] int32; 0 for the rows of a group, at its end, that have no token.
        rejected: [≥ B] int32: of each group, how many of its tokens do not count.
        block, num_warps: channels and warps of a program.
    """
    layers, _, window, channels = state.shape
    block = min(block, triton.next_power_of_2(channels))
    _move_windows_kernel[(slots.shape[0] // group, layers, triton.cdiv(channels, block))](
        state,
        kept,
        slots,
        rejected,
        channels,
        state.stride(0),
        kept.stride(0),
        WINDOW=window,
        GROUP=group,
        BLOCK=block,
        num_warps=num_warps,
    )
