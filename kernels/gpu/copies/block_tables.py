"""New entries of the device's block tables. Reference: ``tables.view(-1)[entries[:, 0]] = entries[:, 1]``."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit(do_not_specialize=["count"])
def _write_tables_kernel(tables, entries, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    place = tl.load(entries + 2 * index, mask=inside, other=0)
    block = tl.load(entries + 2 * index + 1, mask=inside, other=0)
    tl.store(tables + place, block, mask=inside)


def write_tables(tables: Tensor, entries: Tensor) -> None:
    """Writes entries of the block tables.

    Args:
        tables: [num_slots, max_blocks] int32, contiguous, fewer than 2³¹ entries.
        entries: [n, 2] int32, contiguous: place in the flattened tables, block. No place twice.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    if tables.dtype != entries.dtype or entries.shape[1:] != (2,) or not tables.is_contiguous():
        raise ValueError(f"write_tables: tables {tables.dtype}, entries {tuple(entries.shape)} {entries.dtype}")
    count = entries.shape[0]
    if count:
        _write_tables_kernel[(triton.cdiv(count, _BLOCK),)](tables, entries, count, BLOCK=_BLOCK, num_warps=4)
