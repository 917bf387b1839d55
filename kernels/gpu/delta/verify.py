"""The gated delta rule over segments of a few tokens, one token after the other with the state in registers.

Reference: `kernels.gated_delta.chunk_gated_delta`, with gates and gated norm as in `gated_delta_step`. For speculative
decoding: a state is read from one slot and written to another, so that it is still there if a draft token was wrong.
Tokens are computed exactly as `gated_delta_step` computes them one at a time; tiles of 64 would be mostly padding.
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

from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.delta.step import advance, launch_parts, load_inputs, prepared, store_normed
from kernels.gpu.segments import Segments


@triton.jit
def _gated_delta_verify_kernel(
    mixer,
    state,
    begins,
    starts,
    slots,
    out_slots,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    segment = tl.program_id(1)
    i = tl.arange(0, BLOCK_K)[:, None]
    j = tl.arange(0, BLOCK_V)
    if PDL:
        gdc_launch_dependents()
    # The state is on its way before the kernels ahead are done.
    begin = tl.load(begins + segment)
    end = tl.load(begins + segment + 1)
    slot = tl.load(slots + segment).to(tl.int64)
    target = tl.load(out_slots + segment).to(tl.int64)
    held = (i < KEY_DIM) & (j[None, :] < VALUE_DIM)
    known = held & (tl.load(starts + segment) > 0) & (begin < end)
    places = state + ((slot * HEADS + head) * KEY_DIM + i) * VALUE_DIM + j[None, :]
    s = tl.load(places, mask=known, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    for index in tl.range(begin, end):
        row = tl.cast(index, tl.int64)
        token = prepared(load_inputs(row, head, j, mixer, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, BLOCK_K))
        s, o = advance(s, token, mixer.scale)
        store_normed(o, token, row, head, j, mixer, VALUE_DIM)
    places = state + ((target * HEADS + head) * KEY_DIM + i) * VALUE_DIM + j[None, :]
    tl.store(places, s.to(state.dtype.element_ty), mask=held & (begin < end))


def gated_delta_verify(
    mixed: Tensor,
    projected: Tensor,
    negative_a: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    state: Tensor,
    segments: Segments,
    *,
    out: Tensor | None = None,
    num_warps: int = 4,
    pdl: bool = False,
) -> Tensor:
    """Short segments: each goes on from the state of its slot and leaves its new one in its out_slot.

    All arithmetic is float32. Segments of any length are right, but take time in proportion.

    Args:
        mixed: [T, conv_dim], the convolution's output: query | key | value heads.
        projected: [T, conv_dim + value_size + 2 · value_heads], the mixer's projections: qkv | z | b | a.
        negative_a: [value_heads] float32, −exp(A_log).
        dt_bias: [value_heads] float32.
        norm_weight: [value_dim] float32, plain (not 1 + w).
        eps: of the gated norm.
        state: [num_slots, value_heads, key_dim, value_dim] float32 or bfloat16, contiguous. Read as zeros where a
            segment starts at 0.
        segments: where the sequences lie, each on its own; no slot is read by one and written by another.
        out: [T, value_size], where to write; rows outside the segments stay as they are.
        num_warps: of a program, which has one head of one segment.
        pdl: launch before the kernels ahead have finished (kernels.gpu.launch.programmatic): none of them may write
            ``state`` or ``segments``.

    Returns:
        [T, value_size] in mixed's dtype: rms_norm(o) · silu(z); rows outside the segments are undefined.

    Raises:
        ValueError: shapes do not fit.
    """
    shape = DeltaShape.of(mixed, projected, state)
    if out is None:
        out = torch.empty(mixed.shape[0], shape.value_size, dtype=mixed.dtype, device=mixed.device)
    mixer, constants = launch_parts(mixed, projected, negative_a, dt_bias, norm_weight, eps, out, shape, pdl)
    _gated_delta_verify_kernel[(shape.value_heads, segments.max_segments)](
        mixer,
        state,
        segments.begin,
        segments.start,
        segments.slot,
        segments.out_slot,
        **constants,
        num_warps=num_warps,
    )
    return out
