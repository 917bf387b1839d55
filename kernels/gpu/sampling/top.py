"""The most likely tokens of rows that ask for them."""

# Triton's language: constants are upper case and their conditions stand alone; kernels have no annotations for mypy.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.sampling.rows import ALTERNATIVES
from kernels.gpu.sampling.state import MOST_ALTERNATIVES, RAW_LOG_Z, RAW_MAX, RESULT_WORDS, bits, open_row, request_of


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["batch"])
def alternatives_kernel(batch, tables, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Program (row): the most likely tokens of the raw distribution, one a turn. Only the block that holds the next
    one is read: the largest of each block is known."""
    row = open_row(tables, 0, BLOCKS, PDL)
    slot = tl.load(batch.step + row.index)
    if slot <= 0:
        return
    request = request_of(row, slot, batch, tables)
    wanted = tl.load(request.parameters + ALTERNATIVES)
    if wanted == 0:
        return
    result = batch.results + row.index * batch.result_stride + RESULT_WORDS
    log_z = tl.load(row.floats + RAW_LOG_Z)
    index = tl.arange(0, BLOCKS)
    none = float("-inf")
    largest = tl.load(row.partial + RAW_MAX * BLOCKS + index, mask=index * BLOCK < tables.vocab, other=none)
    offset = tl.arange(0, BLOCK)
    # Of equal logits in a block, the token up to which they were taken.
    taken = tl.full((BLOCKS,), -1, tl.int32)
    for turn in range(wanted):
        value = tl.max(largest, axis=0)
        block = tl.min(tl.where(largest == value, index, BLOCKS - 1), axis=0)
        column = block * BLOCK + offset
        x = tl.load(request.logits + column, mask=column < tables.vocab, other=none).to(tl.float32)
        equal = (x == value) & (column > tl.max(tl.where(index == block, taken, -1), axis=0))
        token = tl.minimum(tl.min(tl.where(equal, column, 2147483647), axis=0), tables.vocab - 1)
        tl.store(result + turn, token)
        tl.store(result + MOST_ALTERNATIVES + turn, bits(value - log_z))
        following = tl.max(tl.where((x < value) | (equal & (column > token)), x, none), axis=0)
        largest = tl.where(index == block, following, largest)
        taken = tl.where(index == block, tl.where(following == value, token, -1), taken)
