"""The most likely tokens of rows that ask for them."""

# Triton's language: constants are upper case and their conditions stand alone; kernels have no annotations for mypy.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.sampling_rows import ALTERNATIVES, PARAMETERS
from kernels.gpu.sampling_state import FLOATS, MOST_ALTERNATIVES, PARTIALS, RAW_LOG_Z, RAW_MAX, RESULT_WORDS, bits


@triton.jit(do_not_specialize_on_alignment=["step", "results"])
def alternatives_kernel(
    logits,
    step,
    table,
    partials,
    floats,
    results,
    vocab,
    logits_stride,
    result_stride,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row): the most likely tokens of the raw distribution, one a turn. Only the block that holds the next
    one is read: the largest of each block is known."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(step + row)
    if slot <= 0:
        return
    parameters = table + slot * PARAMETERS
    wanted = tl.load(parameters + ALTERNATIVES)
    if wanted == 0:
        return
    logits += row * logits_stride
    result = results + row * result_stride + RESULT_WORDS
    log_z = tl.load(floats + row * FLOATS + RAW_LOG_Z)
    index = tl.arange(0, BLOCKS)
    partial = partials + row * PARTIALS * BLOCKS
    none = float("-inf")
    largest = tl.load(partial + RAW_MAX * BLOCKS + index, mask=index * BLOCK < vocab, other=none)
    offset = tl.arange(0, BLOCK)
    # Of equal logits in a block, the token up to which they were taken.
    taken = tl.full((BLOCKS,), -1, tl.int32)
    for turn in range(wanted):
        value = tl.max(largest, axis=0)
        block = tl.min(tl.where(largest == value, index, BLOCKS - 1), axis=0)
        column = block * BLOCK + offset
        x = tl.load(logits + column, mask=column < vocab, other=none).to(tl.float32)
        equal = (x == value) & (column > tl.max(tl.where(index == block, taken, -1), axis=0))
        token = tl.minimum(tl.min(tl.where(equal, column, 2147483647), axis=0), vocab - 1)
        tl.store(result + turn, token)
        tl.store(result + MOST_ALTERNATIVES + turn, bits(value - log_z))
        following = tl.max(tl.where((x < value) | (equal & (column > token)), x, none), axis=0)
        largest = tl.where(index == block, following, largest)
        taken = tl.where(index == block, tl.where(following == value, token, -1), taken)
