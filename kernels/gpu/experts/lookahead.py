"""Weights that L2 is asked for while a kernel of few programs leaves memory idle."""

# Triton's language: constants are upper case, kernels have no annotations that mypy knows.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch.device import DeviceLimits
from kernels.gpu.launch.programmatic import prefetch_share

_PROGRAMS = 128
"""Programs that ask: about one a multiprocessor, whose copy engine asks for some 100 bytes a nanosecond."""


class Asked(NamedTuple):
    """Lookahead as kernels take it."""

    tensors: Any
    sizes: Any


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Weights that kernels behind read, and how many bytes of each to ask L2 for."""

    tensors: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    bulk: bool
    """True if the device has one instruction for many bytes."""

    @classmethod
    def of(cls, parts: Iterable[Tensor | None], most: int, device: DeviceLimits) -> Self | None:
        """The first ``most`` bytes of these tensors, one behind the other; None: there are none."""
        tensors: list[Tensor] = []
        sizes: list[int] = []
        for part in (part for part in parts if part is not None):
            size = min(part.nbytes, most - sum(sizes))
            if size > 0:
                tensors.append(part)
                sizes.append(size)
        return cls(tuple(tensors), tuple(sizes), device.bulk_prefetch) if tensors else None


def asking(lookahead: Lookahead | None) -> tuple[Asked | None, dict[str, Any]]:
    """Argument and constants of a kernel whose last ASKING programs ask: none in the interpreter, which has no L2."""
    if lookahead is None or triton.knobs.runtime.interpret:
        return None, {"ASKING": 0, "BULK": False}
    return Asked(lookahead.tensors, lookahead.sizes), {"ASKING": _PROGRAMS, "BULK": lookahead.bulk}


@triton.jit
def ask(asked, share, ASKING: tl.constexpr, BULK: tl.constexpr):
    """Asks for share ``share`` of ASKING; waits for nothing."""
    for i in tl.static_range(len(asked.tensors)):
        prefetch_share(asked.tensors[i], asked.sizes[i], share, ASKING, BULK)
