"""Control of launches of Triton kernels: leaves some out, counts them, deals them out to processes that compile."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

Keep = Callable[[str, tuple[Any, ...], dict[str, Any]], bool]
"""Predicate of launches: True if one takes place, from the kernel's name and what it is launched with."""


@contextmanager
def launches(keep: Keep) -> Iterator[None]:
    """Inside, only launches that ``keep`` wants take place; what the others would have written keeps its contents."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def filtered(original: Any) -> Any:
        def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return (
                original(self, *args, grid=grid, warmup=warmup, **kwargs) if keep(name_of(self), args, kwargs) else None
            )

        return run

    with ExitStack() as stack:
        for kind in (JITFunction, InterpretedFunction):
            stack.enter_context(patch.object(kind, "run", filtered(kind.run)))
        yield


def name_of(kernel: Any) -> str:
    """Name of a jitted function."""
    return str(kernel.fn.__name__)


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Inside, kernels of these names are not launched."""
    with launches(lambda name, _args, _kwargs: name not in names):
        yield


@contextmanager
def ordinary(which: Keep) -> Iterator[None]:
    """Inside, launches that ``which`` wants start when the kernel ahead has ended, though compiled to start before."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime.jit import JITFunction

    late = False
    run, call = JITFunction.run, CudaLauncher.__call__

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        nonlocal late
        late = which(name_of(self), args, kwargs)
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    def launch(self: Any, *args: Any) -> Any:
        with patch.object(self, "launch_pdl", self.launch_pdl and not late):
            return call(self, *args)

    with patch.object(JITFunction, "run", noted), patch.object(CudaLauncher, "__call__", launch):
        yield


@contextmanager
def compiled_alone(which: Keep) -> Iterator[None]:
    """Inside, launches that ``which`` wants are of kernels that know nothing of programmatic launch."""

    def launch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if kwargs.get("launch_pdl") and which(name, args, kwargs):
            kwargs |= {"launch_pdl": False, "PDL": False}
        return True

    with launches(launch):
        yield


@contextmanager
def held_back(which: Keep) -> Iterator[None]:
    """Inside, launches that ``which`` wants hold the kernel behind back if they let it start else, and the reverse."""

    def launch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if "HOLD" in kwargs and which(name, args, kwargs):
            kwargs |= {"HOLD": not kwargs["HOLD"]}
        return True

    with launches(launch):
        yield


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Launches by kernel."""
    found: Counter[str] = Counter()

    def count(name: str, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
        found[name] += 1
        return True

    with launches(count):
        yield found


@contextmanager
def one_share(index: int, of: int) -> Iterator[None]:
    """Inside, one of ``of`` parts of all variants is launched: processes that compile make the same launches, and each
    variant is compiled by one of them."""
    with launches(lambda *launch: zlib.crc32(repr(variant(*launch)).encode()) % of == index):
        yield


def variant(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Key of what Triton compiles a kernel for, roughly: launches that differ here may be the same variant, but those
    that are alike here are."""
    return (name, *map(_argument, args), *sorted(kwargs.items()))


def _argument(value: Any) -> Any:
    """Constants are passed by name, so a number here is one that Triton only asks whether it is 1 or divided by 16."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, tuple):
        return tuple(map(_argument, value))
    if isinstance(value, int):
        return value == 1, value % 16 == 0
    if hasattr(value, "block_shape"):
        return "descriptor", str(value.base.dtype), tuple(value.block_shape)
    return type(value).__name__


_OPERATORS = {"matmul": "__matmul__", "gt": "__gt__", "add_": "__iadd__"}
_PRODUCTS = ("mm", "addmm", "addmm_", "matmul", "linear", "scaled_mm")

Instead = Callable[..., Any]
"""Replacement of a function of torch: from its name, itself, and what it is called with."""


@contextmanager
def replaced(names: Iterable[str], instead: Instead) -> Iterator[None]:
    """Inside, functions of torch, methods of tensors and operators that have these names reach ``instead``.

    A TorchFunctionMode would do the same for each attribute of each tensor as well, which Triton asks for at every
    launch."""

    def of(name: str, original: Any) -> Any:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return instead(name, original, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in names:
            for attribute in filter(None, (name, _OPERATORS.get(name))):
                for owner in (torch, torch.nn.functional, Tensor):
                    original = getattr(owner, attribute, None)
                    if callable(original):  # torch.float is a dtype
                        stack.enter_context(patch.object(owner, attribute, of(name, original)))
        yield


def no_products() -> AbstractContextManager[None]:
    """Inside, torch's matrix products only make their results: on a CPU, where nothing but Triton's launches is wanted,
    they would take most of the time."""
    return replaced(_PRODUCTS, _not_multiplied)


def _not_multiplied(name: str, _original: Any, *args: Any, **given: Any) -> Any:
    if name == "addmm_":
        return args[0]
    if given.get("out") is not None:
        return given["out"]
    left, right = args[1:3] if name == "addmm" else args[:2]
    columns = right.shape[0] if name == "linear" else right.shape[1]
    return torch.empty(*left.shape[:-1], columns, dtype=left.dtype, device=left.device)
