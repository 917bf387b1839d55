"""A kernel's source tells what is compiled, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITFunction

from tests.kernels.compile_table.kernel_source import source_of

SCALE = tl.constexpr(3)


def _called(x: Any) -> Any:
    # A comment.
    return x * SCALE


def _kernel(out: Any, n: Any, SIZE: tl.constexpr) -> None:  # noqa: N803
    """What it does."""
    lane = tl.arange(0, SIZE)  # a lane a number
    tl.store(
        out + lane,
        helper(lane),
        mask=lane < n,
    )


def _same_kernel(out: Any, n: Any, SIZE: tl.constexpr) -> None:  # noqa: N803
    lane = tl.arange(0, SIZE)
    tl.store(out + lane, helper(lane), mask=lane < n)


def _other_kernel(out: Any, n: Any, SIZE: tl.constexpr) -> None:  # noqa: N803
    lane = tl.arange(0, SIZE)
    tl.store(out + lane, helper(lane), mask=lane <= n)


helper = JITFunction(_called)


def source(function: Callable[..., Any]) -> str:
    return source_of(JITFunction(function))


def test_comments_docstrings_and_layout_do_not_count() -> None:
    assert source(_kernel).replace("def _kernel", "def _same_kernel") == source(_same_kernel)
    assert source(_same_kernel).replace("def _same_kernel", "def _other_kernel") != source(_other_kernel)


def test_what_a_kernel_calls_and_the_constants_of_that_count() -> None:
    assert source(_kernel).splitlines()[-3:] == [
        "def _called(x: Any) -> Any:",
        "    return x * SCALE",
        "SCALE = constexpr[3]",
    ]
