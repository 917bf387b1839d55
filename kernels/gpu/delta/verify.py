"""The gated delta rule over a few tokens of each of several sequences, of which only the first ones may count.

Reference: `kernels.gated_delta.recurrent_gated_delta`, with gates and gated norm as in `gated_delta_step`. For
speculative decoding: what the tokens add to a state waits beside it (`waiting_writes`), and `cut_spans` drops the
writes of draft tokens that turn out to be wrong. So a state is rolled back by a byte a value dimension, without a copy.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.delta.step import (
    launch_parts,
    load_inputs,
    load_state,
    prepared,
    store_normed,
    store_state,
    write_and_output,
)
from kernels.gpu.delta.waiting_writes import WaitingWrites, add_pairs, put_write, set_span, settled, span_of
from kernels.gpu.elementary import exponential

_BYTES = 1024
"""Bytes of the spans of a slot that one program cuts."""


@triton.jit
def _gated_delta_verify_kernel(
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
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one sequence: its state, with what waited, stays in registers."""
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    begin = (tl.program_id(0) // HEADS) * GROUP
    head = tl.program_id(0) % HEADS
    if PDL:
        gdc_launch_dependents()
    # The state is on its way before the kernels ahead are done.
    place = tl.load(slots + begin).to(tl.int64) * HEADS + head
    first, end = span_of(waiting, place, 0, VALUE_DIM)
    s = load_state(state, place, i, j, KEY_DIM, VALUE_DIM)
    s = settled(s, waiting, place, first, end, i, j, KEY_DIM, VALUE_DIM, ROOM)
    if PDL:
        gdc_wait()
    if end + GROUP > ROOM:
        store_state(s, state, place, i, j, KEY_DIM, VALUE_DIM)
        first, end = 0, 0
    for index in tl.static_range(GROUP):
        row = (begin + index).to(tl.int64)
        token = prepared(load_inputs(row, head, j, mixer, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, BLOCK_K))
        read, o = tl.reduce((s * token.k[:, None], s * token.q[:, None]), 0, add_pairs)
        delta, o = write_and_output(token, read, o, mixer.scale)
        s = exponential(token.log_decay) * s + token.k[:, None] * delta[None, :]
        store_normed(o, token, row, head, j, mixer, VALUE_DIM)
        # Rows without a token are the last ones of their group.
        if tl.load(slots + row) > 0:
            put_write(waiting, place, end, token, delta, j, KEY_DIM, VALUE_DIM, ROOM, BLOCK_K)
            end += 1
    set_span(waiting, place, j, first, end, VALUE_DIM)


def gated_delta_verify(
    mixed: Tensor,
    projected: Tensor,
    negative_a: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    state: Tensor,
    slots: Tensor,
    waiting: WaitingWrites,
    group: int,
    *,
    out: Tensor | None = None,
    num_warps: int = 4,
    pdl: bool = False,
) -> Tensor:
    """Groups of ``group`` rows: each is of one sequence and goes on from the state of its slot. What its tokens add
    waits; the state itself is written, as it was before them, where there is no room for more writes.

    All arithmetic is float32.

    Args:
        mixed, projected, negative_a, dt_bias, norm_weight, eps, state: see gated_delta_step, for B groups of rows.
        slots: [B · group] int32; 0 for the rows of a group, at its end, that have no token. Groups may share only slot
            0, whose contents nobody reads.
        waiting: writes of the same slots that are not in ``state`` yet, with room for a group.
        out: [B · group, value_size], where to write.
        num_warps: of a program, which has one head of one sequence.
        pdl: launch before the kernels ahead have finished (kernels.gpu.launch.programmatic): none of them may write
            ``state``, ``waiting`` or ``slots``.

    Returns:
        [B · group, value_size] in mixed's dtype: rms_norm(o) · silu(z); undefined in rows without a token.

    Raises:
        ValueError: shapes do not fit.
    """
    shape = DeltaShape.of(mixed, projected, state)
    rows = slots.shape[0]
    if rows % group or not 1 <= group <= waiting.room:
        raise ValueError(f"{rows} rows in groups of {group}, beside states with room for {waiting.room} writes")
    if out is None:
        out = torch.empty(rows, shape.value_size, dtype=mixed.dtype, device=mixed.device)
    mixer, constants = launch_parts(mixed, projected, negative_a, dt_bias, norm_weight, eps, out, shape, pdl)
    if rows:
        _gated_delta_verify_kernel[(rows // group * shape.value_heads,)](
            mixer,
            state,
            slots,
            waiting.arguments(state),
            ROOM=waiting.room,
            GROUP=group,
            **constants,
            num_warps=num_warps,
        )
    return out


@triton.jit
def _cut_spans_kernel(spans, slots, rejected, bytes_a_slot, layer_stride, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    sequence = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    count = tl.load(rejected + sequence)
    slot = tl.load(slots + sequence * GROUP).to(tl.int64)
    if (count > 0) & (slot > 0):
        byte = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = byte < bytes_a_slot
        places = spans + layer * layer_stride + slot * bytes_a_slot + byte
        span = tl.load(places, mask=inside, other=0).to(tl.int32)
        tl.store(places, (span - count).to(tl.int8), mask=inside)


def cut_spans(waiting: WaitingWrites, slots: Tensor, rejected: Tensor, group: int) -> None:
    """Drops the newest writes that wait beside the states of all layers.

    Args:
        waiting: [layers, num_slots, ...].
        slots: [B · group] int32, of gated_delta_verify().
        rejected: [≥ B] int32: of each group, how many of its rows' writes.
    """
    layers, _, heads, value_dim = waiting.spans.shape
    size = heads * value_dim
    block = min(_BYTES, triton.next_power_of_2(size))
    _cut_spans_kernel[(slots.shape[0] // group, layers, triton.cdiv(size, block))](
        waiting.spans,
        slots,
        rejected,
        size,
        waiting.spans.stride(0),
        GROUP=group,
        BLOCK=block,
        num_warps=2,
    )
