"""EngineGate: the engine's side of the compute gate, by which steps and training take turns on one device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class EngineGate(Protocol):
    """The engine's side of the compute gate, which the loop holds while it has steps in flight."""

    @property
    def contended(self) -> bool:
        """Whether a trainer computes or waits to: the gate should be released after each step."""
        ...

    def acquire(self) -> None:
        """Waits until the device is the engine's."""
        ...

    def release(self, step_seconds: float) -> None:
        """No step is in flight; the last one computed for so long."""
        ...

    def launching(self) -> AbstractContextManager[None]:
        """Around each launch of a step."""
        ...

    def engine_idle(self) -> None:
        """There is nothing to run, or what there is waits for something else than the device."""
        ...
