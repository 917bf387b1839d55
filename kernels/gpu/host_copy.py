"""Copies of a few words between the host's page-locked memory and the device, as a kernel.

The reference is ``target.copy_(source)``. A copy engine has a stream to itself for a moment: 25 µs lay on an H200
between the last kernel of a step and the first one of the next, with a copy to the host and one to the device between
them. A kernel reads and writes such memory over the bus at addresses that the device knows as well (unified addressing,
CUDA C++ Programming Guide), and follows the kernel ahead like any other.
"""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512


@triton.jit(do_not_specialize=["count"])
def _copy_kernel(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def copy_words(target: Tensor, source: Tensor) -> None:
    """Queues a copy. One side may lie in the host's page-locked memory; what the host reads there is whole once a later
    event of the stream has come.

    Args:
        target, source: contiguous int32, as many of each.

    Raises:
        ValueError: they do not fit each other.
    """
    count = source.numel()
    if target.numel() != count or target.dtype != source.dtype:
        raise ValueError(f"copy_words: {source.dtype} {tuple(source.shape)} to {target.dtype} {tuple(target.shape)}")
    if not (source.is_contiguous() and target.is_contiguous()):
        raise ValueError("copy_words: both sides must be contiguous")
    if count:
        _copy_kernel[(triton.cdiv(count, _BLOCK),)](source, target, count, BLOCK=_BLOCK)
