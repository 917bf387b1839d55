"""A bounds checker for kernels in Triton's interpreter: every lane that is not masked must stay inside the tensor that
its pointer came from.

On a GPU such a lane reads or writes whatever lies there, and the process dies only where nothing is mapped: long after
the mistake, in another kernel's name. Here it is an error at once, with kernel, argument, place and line.

- A pointer belongs to the argument that it was computed from, through arithmetic, shapes and casts; a tensor ends where
  the last element of its view does, not where its storage does. A kernel that goes from one column of a matrix to
  another through a view of one of them is told here which tensor to be given.
- A pointer that was read from memory as a number (a table of addresses) may point into any tensor of the launch and
  those that `allow` names.
- What torch.empty() gives is filled: NaN in floats, the largest number in integers. An index that nobody wrote leaves
  all tensors, a number that nobody wrote makes a result NaN.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

_REGION = "temper.region"
_PASSED_ON = ("create_addptr", "create_splat", "create_unsplat", "create_broadcast", "create_expand_dims",
              "create_reshape", "create_trans", "create_bitcast")  # fmt: skip
"""Operations whose result points where their first operand does; create_bitcast also under the names of casts."""
_HERE = os.path.dirname(os.path.abspath(__file__))


class OutOfBounds(AssertionError):
    """A lane that is not masked left the tensor that its pointer came from."""


@dataclass(frozen=True, slots=True)
class Region:
    """Addresses of a tensor's elements, from the first to one past the last."""

    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def holds(self, places: npt.NDArray[Any], size: int) -> bool:
        """True if elements of so many bytes at all these addresses are inside."""
        return not places.size or (int(places.min()) >= self.begin and int(places.max()) + size <= self.end)

    @classmethod
    def of(cls, tensor: Tensor) -> Region:
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        count = span + 1 if tensor.numel() else 0
        begin = tensor.data_ptr()
        return cls(begin, begin + count * tensor.element_size(), tuple(tensor.shape), tensor.dtype)


@dataclass(slots=True)
class Checked:
    """Counts of what was checked."""

    launches: dict[str, int] = field(default_factory=dict)
    """By kernel."""
    accesses: int = 0


class _Checker:
    """State of a launch: one at a time, as the interpreter runs them."""

    def __init__(self, allowed: Iterable[Tensor]) -> None:
        self.counts = Checked()
        self._allowed = [Region.of(tensor) for tensor in allowed]
        self._names: list[tuple[str, Region]] = []
        self._kernel = ""

    def begin(self, kernel: str, arguments: dict[str, Any]) -> None:
        self._kernel = kernel
        self._names = list(_regions(arguments))
        self.counts.launches[kernel] = self.counts.launches.get(kernel, 0) + 1

    def check(self, pointers: Any, mask: npt.NDArray[Any] | None, what: str) -> None:
        self.counts.accesses += 1
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        region: Region | None = pointers.attr.get(_REGION)
        places = pointers.data
        if region is not None and region.holds(places, size):
            return
        if mask is not None:  # conditions are of any integer in the interpreter
            places = places[np.broadcast_to(mask.astype(bool), places.shape)]
        if region is not None:
            if not region.holds(places, size):
                raise OutOfBounds(self._complaint(region, places, size, what))
            return
        known = [each for _, each in self._names] + self._allowed
        inside = np.zeros(places.shape, bool)
        for each in known:
            inside |= (places >= each.begin) & (places + np.uint64(size) <= each.end)
        if not inside.all():
            raise OutOfBounds(f"{self._kernel}: {what} at an address that is in no tensor of the launch{_line()}")

    def _complaint(self, region: Region, places: npt.NDArray[Any], size: int, what: str) -> str:
        names = [name for name, each in self._names if each == region] or ["?"]
        offsets = places.astype(np.int64) - region.begin
        outside = offsets[(offsets < 0) | (offsets + size > region.end - region.begin)]
        return (
            f"{self._kernel}: {what} of {' = '.join(names)} {region.dtype} {list(region.shape)}, "
            f"{region.end - region.begin} bytes: {outside.size} of {places.size} lanes outside, at bytes "
            f"{int(outside.min())} to {int(outside.max())}{_line()}"
        )


def _regions(arguments: dict[str, Any]) -> Iterator[tuple[str, Region]]:
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, Region.of(value)
        elif isinstance(base := getattr(value, "base", None), Tensor):
            yield name, Region.of(base)
        elif isinstance(value, tuple):
            fields = getattr(value, "_fields", None) or [str(index) for index in range(len(value))]
            yield from _regions({f"{name}.{field}": item for field, item in zip(fields, value, strict=True)})


def _line() -> str:
    """Where in the repository's kernels the access is."""
    frames = [f for f in traceback.extract_stack() if f"{os.sep}kernels{os.sep}gpu{os.sep}" in f.filename]
    frames = [frame for frame in frames if not frame.filename.startswith(_HERE)]
    return "".join(f"\n  {frame.filename}:{frame.lineno} {frame.name}: {frame.line}" for frame in frames[-4:])


@contextmanager
def bounds_checked(*allow: Tensor) -> Iterator[Checked]:
    """Inside, launches are checked, and memory that torch.empty() gives is filled.

    Args:
        allow: tensors that kernels reach through addresses in memory.

    Raises:
        InterpreterError: from the launch; its text has OutOfBounds.
    """
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    checker = _Checker(allow)
    launch, convert = executor.__call__, interpreter._implicit_cvt
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        checker.begin(self.fn.__name__, dict(zip(self.arg_names, args, strict=False)) | kwargs)
        launch(self, *args, **kwargs)

    def converted(argument: Any) -> Any:
        made = convert(argument)
        if isinstance(argument, Tensor):
            made.handle.set_attr(_REGION, Region.of(argument))
        return made

    def passed_on(operation: Any) -> Any:
        def same_region(self: Any, *operands: Any, **named: Any) -> Any:
            result = operation(self, *operands, **named)
            source = next(operand for operand in operands if isinstance(operand, interpreter.TensorHandle))
            if _REGION in source.attr:
                result.attr[_REGION] = source.attr[_REGION]
            return result

        return same_region

    def of_base(materialize: Any) -> Any:
        def same_region(self: Any, *operands: Any) -> Any:
            pointers, masks = materialize(self, *operands)
            if _REGION in self.base.attr:
                pointers.attr[_REGION] = self.base.attr[_REGION]
            return pointers, masks

        return same_region

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        checker.check(pointers, _numbers(mask), "load")
        return load(self, pointers, mask, *rest, **named)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        checker.check(pointers, _numbers(mask), "store")
        return store(self, pointers, value, mask, *rest, **named)

    def checked_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        checker.check(pointers, _numbers(mask), "atomic")
        return rmw(self, operation, pointers, value, mask, *rest)

    def checked_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        checker.check(pointers, None, "atomic")
        return cas(self, pointers, *rest)

    with pytest.MonkeyPatch.context() as patch, _filled_memory():
        patch.setattr(executor, "__call__", launched)
        patch.setattr(interpreter, "_implicit_cvt", converted)
        for name in _PASSED_ON:
            patch.setattr(builder, name, passed_on(getattr(builder, name)))
        patch.setattr(builder, "create_int_to_ptr", builder.create_bitcast)
        for handle in (interpreter.BlockPointerHandle, interpreter.TensorDescHandle):
            patch.setattr(handle, "materialize_pointers", of_base(handle.materialize_pointers))
        patch.setattr(builder, "create_masked_load", checked_load)
        patch.setattr(builder, "create_masked_store", checked_store)
        patch.setattr(builder, "create_atomic_rmw", checked_rmw)
        patch.setattr(builder, "create_atomic_cas", checked_cas)
        yield checker.counts


def _numbers(mask: Any) -> npt.NDArray[Any]:
    """A mask is a handle, or an array where a descriptor made it."""
    found: npt.NDArray[Any] = mask if isinstance(mask, np.ndarray) else mask.data
    return found


@contextmanager
def _filled_memory() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
