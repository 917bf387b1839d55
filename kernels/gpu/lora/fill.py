"""An adapter's matrices from the bytes of its file into their slot: converted, scaled and laid out in one kernel.

Reference, for each entry: ``target[:rank] = (source * scale).clamp(-largest, largest)``, ``target[rank:] = 0``.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of the dtypes of numbers in a file."""
_FIELDS = (
    "source",  # bytes from the start of the staged piece, a multiple of the item size
    "format",  # one of FORMATS
    "rank",  # rows that the source has; 0: the target becomes zeros
    "row_step",  # source elements from one row to the next
    "column_step",  # and from one column to the next
    "columns",
    "target",  # address of the target's first element
    "target_step",  # target elements from one row to the next; columns lie side by side
    "scale",  # the bits of a float32
    "ordered",  # 1: column c comes from the source's column order[c]
)
ENTRY = np.dtype([(name, np.int64) for name in _FIELDS])
"""Entry of one matrix that is copied: [rank, columns] as the target has it, whichever way round the source is."""
WORDS = len(_FIELDS)
"""Words of an entry."""
_TILE = 4096
"""Elements of one program."""


def tile_columns(max_rank: int) -> int:
    """Columns of one program."""
    return max(32, _TILE // int(triton.next_power_of_2(max_rank)))


def tiles_of(columns: npt.NDArray[np.int64], max_rank: int) -> npt.NDArray[np.int32]:
    """[tiles, 2] int32: the entry and the first column of every program, entry by entry.

    Args:
        columns: of each entry.
    """
    width = tile_columns(max_rank)
    counts = -(-columns // width)
    entry = np.repeat(np.arange(len(columns)), counts)
    within = np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack((entry, within * width), axis=1).astype(np.int32)


@triton.jit(do_not_specialize=["first"])
def _fill_kernel(
    source,
    entries,
    tiles,
    first,
    order,
    fault,
    like,
    largest,
    MAX_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
):
    tile = first + tl.program_id(0)
    entry = entries + tl.load(tiles + 2 * tile).to(tl.int64) * WORDS
    start = source + tl.load(entry)
    kind = tl.load(entry + 1)
    rank = tl.load(entry + 2)
    row_step = tl.load(entry + 3)
    column_step = tl.load(entry + 4)
    columns = tl.load(entry + 5)
    target = tl.load(entry + 6).to(like.dtype)
    target_step = tl.load(entry + 7)
    scale = tl.load(entry + 8).to(tl.int32).to(tl.float32, bitcast=True)
    ordered = tl.load(entry + 9) != 0

    row = tl.arange(0, ROWS)
    column = tl.load(tiles + 2 * tile + 1) + tl.arange(0, COLUMNS)
    inside = column < columns
    origin = tl.where(ordered, tl.load(order + column, mask=inside & ordered, other=0), column)
    read = (row < rank)[:, None] & inside[None, :]
    at = row[:, None] * row_step + origin[None, :] * column_step
    single = tl.load(start.to(tl.pointer_type(tl.float32)) + at, mask=read & (kind == 0), other=0.0)
    brain = tl.load(start.to(tl.pointer_type(tl.bfloat16)) + at, mask=read & (kind == 1), other=0.0)
    half = tl.load(start.to(tl.pointer_type(tl.float16)) + at, mask=read & (kind == 2), other=0.0)
    value = tl.where(kind == 0, single, tl.where(kind == 1, brain.to(tl.float32), half.to(tl.float32)))
    # What is not finite is told and never written: steps may multiply slots that none of their rows uses by zero.
    finite = tl.abs(value) < float("inf")
    if tl.min(tl.min(finite.to(tl.int32), axis=1), axis=0) == 0:
        tl.store(fault, 1)
    value = tl.where(finite, value, 0.0) * scale
    value = tl.minimum(tl.maximum(value, -largest), largest)
    write = (row < MAX_RANK)[:, None] & inside[None, :]
    place = target + row[:, None] * target_step + column[None, :]
    tl.store(place, value.to(like.dtype.element_ty), mask=write)


def fill_lora(
    source: Tensor,
    entries: Tensor,
    tiles: Tensor,
    order: Tensor,
    fault: Tensor,
    like: Tensor,
    *,
    first: int,
    count: int,
    max_rank: int,
) -> None:
    """Fills the targets of some tiles, in one kernel.

    Args:
        source: [bytes] uint8, what the entries' sources point into.
        entries: [entries, WORDS] int64, of ENTRY.
        tiles: [all tiles, 2] int32, from tiles_of().
        order: int32, of entries that are ordered; at least one element.
        fault: [1] int32; becomes 1 if a number of the source is not finite, which is written as 0.
        like: any tensor of the targets' dtype.
        first, count: which tiles.
        max_rank: rows of every target.

    Raises:
        ValueError: a rank, shape or dtype does not fit.
    """
    if max_rank < 1 or entries.shape[1] != WORDS or first < 0 or first + count > tiles.shape[0]:
        raise ValueError(f"fill_lora: tiles {first} to {first + count} of {tiles.shape[0]}, entries {entries.shape}")
    if not count:
        return
    _fill_kernel[(count,)](
        source,
        entries,
        tiles,
        first,
        order,
        fault,
        like,
        torch.finfo(like.dtype).max,
        MAX_RANK=max_rank,
        ROWS=triton.next_power_of_2(max_rank),
        COLUMNS=tile_columns(max_rank),
        WORDS=WORDS,
        num_warps=4,
    )
