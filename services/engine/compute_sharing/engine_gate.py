"""EngineGate: the engine's side of the compute gate, by which steps and training take turns on one device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class EngineGate(Protocol):
    """The engine's side of the compute gate, which the loop holds while it has steps in flight."""

    @property
    def contended(self) -> bool:
        """True if a trainer computes or waits to: the gate should be released after each step."""
        ...

    def acquire(self) -> None:
        """Waits until the engine has the device."""
        ...

    def release(self, step_seconds: float) -> None:
        """Releases the gate when no step is in flight; the last one has computed for so many seconds."""
        ...

    def launching(self) -> AbstractContextManager[None]:
        """Context manager around each launch of a step."""
        ...

    def engine_idle(self) -> None:
        """Tells that the engine has nothing to run, or that its requests wait for something other than the device."""
        ...
