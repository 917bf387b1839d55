"""Weights of all experts of a layer as kernels take them, and the part of one of them."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.gpu.linear.skinny import Weight, parts_of


class Stack(NamedTuple):
    """One linear map of every expert; with the shared expert's, which has a matrix of its own, or None."""

    words: Any
    """[experts · out, in] as the kernels of `kernels.gpu.linear` read it, with its scale and zero points."""
    scale: Any
    zero: Any
    shared_words: Any
    shared_scale: Any
    shared_zero: Any

    @classmethod
    def of(cls, weight: Weight, shared: Weight | None = None) -> Stack:
        """Stack of matrices of one kind."""
        return cls(*parts_of(weight), *((None, None, None) if shared is None else parts_of(shared)))


@triton.jit
def tensor_of(every, shared, expert, EXPERTS: tl.constexpr):
    """The tensor that an expert's numbers are in. Expert number EXPERTS is the shared one."""
    if shared is None:
        return every
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return tl.where(expert == EXPERTS, shared, every)


@triton.jit
def rows_of(stack, expert, EXPERTS: tl.constexpr, N: tl.constexpr):
    """First of an expert's N rows in that tensor, and all rows that it has."""
    if stack.shared_words is None:
        return expert * N, EXPERTS * N
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return tl.where(expert == EXPERTS, 0, expert * N), tl.where(expert == EXPERTS, N, EXPERTS * N)
