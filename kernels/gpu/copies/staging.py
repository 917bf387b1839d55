"""Items of a pool, blocks of keys and values or states of sequences, to and from a staging buffer that has them in one
piece, with their checksums. Reference: indexing, and Σ wᵢ xᵢ mod 2⁶⁴ over an item's 64-bit words.

The weights are odd numbers of SplitMix64 (Steele, Lea & Flood 2014), made here: a state's would be as large as itself.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
"""Words of one program: 16 KiB in flight."""


@triton.jit
def weights_of(word):
    """Checksum weights of the words of an item with these numbers, int64."""
    z = (word + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) | 1).to(tl.int64, bitcast=True)


@triton.jit(do_not_specialize=["first_word"], do_not_specialize_on_alignment=["items", "sums"])
def _move_kernel(
    pool,
    staging,
    items,
    sums,
    words,
    row_stride,
    item_stride,
    first_word,
    TO_POOL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    item = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < words
    place = pool + row * row_stride + tl.load(items + item).to(tl.int64) * words + column
    staged = staging + item * item_stride + row * words + column
    if TO_POOL:
        x = tl.load(staged, mask=inside, other=0)
        tl.store(place, x, mask=inside)
    else:
        x = tl.load(place, mask=inside, other=0)
        tl.store(staged, x, mask=inside)
    weighted = x * weights_of(first_word + row * words + column)
    tl.atomic_add(sums + item, tl.sum(weighted), sem="relaxed")


def move_items(
    pool: Tensor, staging: Tensor, items: Tensor, sums: Tensor, *, item_stride: int, first_word: int, to_pool: bool
) -> None:
    """Copies rows of some items, all of them in one kernel, and adds their part to the items' checksums.

    Args:
        pool: [rows, slots, words] int64, each [slots, words] contiguous.
        staging: int64, contiguous: the rows of the first item one after the other, ``item_stride`` words later those
            of the next.
        items: [n] int32, their slots, each another one if they are written.
        sums: [n] int64, added to.
        first_word: number that the first row's first word has in its item.
        to_pool: from the staging buffer to the pool; False: the other way.

    Raises:
        ValueError: dtypes or layouts are others, or the staging buffer is too small.
    """
    rows, _, words = pool.shape
    count = items.shape[0]
    if pool.dtype != torch.int64 or staging.dtype != torch.int64 or sums.dtype != torch.int64:
        raise ValueError("move_items: what is copied and the sums are int64")
    if pool.stride()[1:] != (words, 1) or not staging.is_contiguous() or sums.shape != (count,):
        raise ValueError(f"move_items: pool of strides {pool.stride()}, sums {tuple(sums.shape)} for {count} items")
    if not rows or not count or not words:
        return
    if (count - 1) * item_stride + rows * words > staging.numel():
        raise ValueError(f"move_items: {count} items do not fit into {staging.numel()} words")
    _move_kernel[(triton.cdiv(words, _BLOCK), rows, count)](
        pool,
        staging,
        items,
        sums,
        words,
        pool.stride(0),
        item_stride,
        first_word,
        TO_POOL=to_pool,
        BLOCK=_BLOCK,
        num_warps=4,
    )
