"""Where long computations on matrices run: which device, in pieces of how many numbers, and when.

Beside an engine each piece waits for its turn at the gate and takes a few milliseconds, so that serving is not held up.
What a GPU needs the host for (small decompositions, random draws) happens outside the gate: nothing waits for the
device while it is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

_NUMBERS = {"cpu": 2**19}
_NUMBERS_ELSEWHERE = 2**21
"""Numbers of a piece. On one CPU core a piece's product with 24 columns and back takes two milliseconds; on a GPU
smaller ones would be launches more than work."""


class Gate(Protocol):
    """services.trainer.host.policy_host.ComputeGate."""

    def training(self) -> AbstractContextManager[None]:
        """Held while something computes; entering waits for the others' turn to end."""
        ...

    def give_way(self) -> None:
        """Called inside training() between pieces."""
        ...


class OpenGate:
    """Nobody else computes here."""

    def training(self) -> AbstractContextManager[None]:
        """Nothing is waited for."""
        return nullcontext()

    def give_way(self) -> None:
        """Nobody is let through."""


@dataclass(frozen=True, slots=True)
class Workshop:
    """A device and its gate.

    Raises:
        ValueError: a piece of less than one number.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    gate: Gate = field(default_factory=OpenGate)
    numbers: int | None = None
    """Numbers of a piece at most, but at least one row; None: what suits the device."""

    def __post_init__(self) -> None:
        if self.numbers is not None and self.numbers < 1:
            raise ValueError(f"a piece has at least one number, not {self.numbers}")

    @property
    def piece_numbers(self) -> int:
        """Numbers of a piece."""
        return self.numbers or _NUMBERS.get(self.device.type, _NUMBERS_ELSEWHERE)

    def turn(self) -> AbstractContextManager[None]:
        """Around work on the device. Nothing inside waits for the device; not to be entered twice."""
        return self.gate.training()

    def host(self) -> AbstractContextManager[None]:
        """Around work on the CPU: a turn if the CPU is the device that is shared."""
        return self.gate.training() if self.device.type == "cpu" else nullcontext()

    def give_way(self) -> None:
        """Inside turn(), between pieces."""
        self.gate.give_way()

    def rows(self, shape: torch.Size | tuple[int, int], *, layers: int = 1) -> list[slice]:
        """A matrix in pieces of whole rows.

        Args:
            layers: matrices of this shape that are worked on at once.
        """
        height, width = shape
        step = max(1, self.piece_numbers // (width * layers))
        return [slice(start, min(start + step, height)) for start in range(0, height, step)]

    def pieces(self, shape: torch.Size | tuple[int, int]) -> Iterator[slice]:
        """The same inside turn(): gives way after each."""
        for rows in self.rows(shape):
            yield rows
            self.give_way()


ALONE = Workshop()
"""The CPU, with nobody else on it."""
