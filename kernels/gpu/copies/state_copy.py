"""Copies between slots of a pool: of sequence states, and of blocks of keys and values. Reference: ``pool[:, targets] =
pool[:, sources]``."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Elements of one program: 16 bytes a thread and more in flight."""


@triton.jit
def _copy_states_kernel(pool, pairs, size, layer_stride, BLOCK: tl.constexpr):
    pair = tl.program_id(1)
    source = tl.load(pairs + 2 * pair).to(tl.int64)
    target = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    layer = pool + tl.program_id(2).to(tl.int64) * layer_stride
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    value = tl.load(layer + source * size + offset, mask=inside)
    tl.store(layer + target * size + offset, value, mask=inside)


def copy_states(pool: Tensor, pairs: Tensor) -> None:
    """Copies slots of all layers, in one kernel.

    Args:
        pool: [layers, num_slots, ...], contiguous.
        pairs: [n, 2] int32, contiguous: source slot, target slot. No slot is the target of two copies or both a source
            and a target: the copies run in any order.

    Raises:
        ValueError: the pool is not contiguous.
    """
    if not pool.is_contiguous():
        raise ValueError("copy_states: the pool must be contiguous")
    layers, slots = pool.shape[:2]
    if not layers or not pairs.shape[0]:
        return
    size = pool.stride(0) // slots
    grid = (triton.cdiv(size, _BLOCK), pairs.shape[0], layers)
    _copy_states_kernel[grid](pool, pairs, size, pool.stride(0), BLOCK=_BLOCK, num_warps=8)
