"""The bounds checker finds what it is for, and nothing else."""

# ruff: noqa: N803 (constants of kernels are upper case)
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from kernels.gpu.copies.state_copy import copy_states
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.kernels.gpu.bounds import bounds_checked

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="only the interpreter checks accesses")


class _Sources(NamedTuple):
    x: Any
    index: Any


@triton.jit
def _gather_kernel(sources, out, count, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    inside = lane < count if MASKED else lane >= 0
    place = tl.load(sources.index + lane, mask=inside, other=0)
    tl.store(out + lane, tl.load(sources.x + place, mask=inside, other=0.0), mask=inside)


@triton.jit
def _count_kernel(counters, place):
    tl.atomic_add(counters + place, 1)


@triton.jit
def _address_kernel(addresses, like):
    tl.store(tl.load(addresses).to(like.dtype), 1.0)


def _gather(index: torch.Tensor, *, masked: bool = True, count: int = 5) -> torch.Tensor:
    x, out = torch.arange(20.0)[:10], torch.empty(5)  # the storage goes on behind x
    _gather_kernel[(1,)](_Sources(x, index), out, count, BLOCK=8, MASKED=masked)
    return out


def test_what_is_inside_passes() -> None:
    index = torch.tensor([3, 9, 0, 1, 2], dtype=torch.int32)
    with bounds_checked() as checked:
        assert _gather(index).tolist() == [3, 9, 0, 1, 2]
        _count_kernel[(1,)](torch.zeros(2, dtype=torch.int32), 1)
    assert checked.launches == {"_gather_kernel": 1, "_count_kernel": 1}


@pytest.mark.parametrize("place", [10, -1])
def test_a_place_outside_its_view(place: int) -> None:
    """Even where the storage has more, or another argument lies."""
    index = torch.tensor([3, place, 0, 1, 2], dtype=torch.int32)
    with bounds_checked(), pytest.raises(InterpreterError, match=r"load of sources\.x .*1 of 5 lanes outside"):
        _gather(index)


def test_a_lane_without_a_mask() -> None:
    with bounds_checked(), pytest.raises(InterpreterError, match=r"load of sources\.index .*3 of 8 lanes outside"):
        _gather(torch.zeros(5, dtype=torch.int32), masked=False)


def test_a_store_and_an_atomic() -> None:
    with bounds_checked():
        with pytest.raises(InterpreterError, match=r"_gather_kernel: store of out .*1 of 6 lanes outside, at bytes 20"):
            _gather(torch.zeros(6, dtype=torch.int32), count=6)
        with pytest.raises(InterpreterError, match=r"_count_kernel: atomic of counters"):
            _count_kernel[(1,)](torch.zeros(2, dtype=torch.int32), 2)


def test_an_index_that_nobody_wrote() -> None:
    with bounds_checked(), pytest.raises(InterpreterError, match=r"sources\.x"):
        _gather(torch.empty(5, dtype=torch.int32))


def test_an_address_from_memory() -> None:
    """It must be of a tensor that the caller names."""
    known, other = torch.zeros(1), torch.zeros(1)
    with bounds_checked(known):
        _address_kernel[(1,)](torch.tensor([known.data_ptr()]), torch.zeros(1))
        with pytest.raises(InterpreterError, match="_address_kernel: store at an address that is in no tensor"):
            _address_kernel[(1,)](torch.tensor([other.data_ptr()]), torch.zeros(1))
    assert known.item() == 1


def test_a_kernel_of_ours() -> None:
    """The place in the source is told."""
    with bounds_checked(), pytest.raises(InterpreterError, match=r"_copy_states_kernel: load of pool .*state_copy\.py"):
        copy_states(torch.zeros(1, 3, 4), torch.tensor([[3, 1]], dtype=torch.int32))
