"""Rounds that are sampled ahead: by the engine, while the trainer takes the steps of an earlier one.

A thread samples the planned rounds one after the other, so that which completions share a step of the engine does not
depend on how fast the trainer is. Each round has a copy of the policy that it was planned with: a round that was
interrupted, or is in a checkpoint, is sampled again from the same weights and seeds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.engine.models.lora.trainable import LoraParams

T = TypeVar("T")
_LOOK_SECONDS = 0.05
"""Seconds between two checks whether the job may continue."""


@dataclass(slots=True)
class PlannedRound(Generic[T]):
    """A round that is to be sampled, or has been."""

    number: int
    version: int
    """Rounds that its policy had been trained on."""
    policy: LoraParams
    """Copy that nobody changes."""
    found: T | None = None
    """What was sampled; None: not all of it yet."""


class _Stopped(Exception):
    """Nobody waits for the round any more."""


class SamplingAhead(Generic[T]):
    """Planned rounds, and the thread that samples them.

    Args:
        sample: samples a round; calls what it is given several times a second and lets pass what that raises. It runs
            on the thread.
    """

    def __init__(self, sample: Callable[[PlannedRound[T], Callable[[], None]], T]) -> None:
        self._sample = sample
        self._changed = threading.Condition()
        # Guarded by the condition's lock.
        self._planned: list[PlannedRound[T]] = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stop = threading.Event()

    @property
    def planned(self) -> list[PlannedRound[T]]:
        """Rounds that have not been taken, in order."""
        with self._changed:
            return list(self._planned)

    def plan(self, planned: PlannedRound[T]) -> None:
        """Adds a round behind the others; go_on() begins with it."""
        with self._changed:
            self._planned.append(planned)

    def go_on(self) -> None:
        """Samples what is planned, if that is not under way."""
        with self._changed:
            if self._thread is None and self._error is None and self._next() is not None:
                self._stop = threading.Event()
                self._thread = threading.Thread(target=self._work, args=(self._stop,), name="rounds-ahead", daemon=True)
                self._thread.start()

    def take(self, interrupt: Callable[[], None]) -> PlannedRound[T]:
        """The first planned round, once it has been sampled; it is planned no more. ``interrupt`` may raise.

        Raises:
            ValueError: none is planned.
            Exception: what sampling it raised. The next go_on() tries again.
        """
        self.go_on()
        while True:
            with self._changed:
                if not self._planned:
                    raise ValueError("no round is planned")
                self._changed.wait_for(self._settled, _LOOK_SECONDS)
                if self._planned[0].found is not None:
                    return self._planned.pop(0)
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
            interrupt()

    def stop(self) -> None:
        """Ends what is under way and waits for that. What is planned stays so."""
        with self._changed:
            thread = self._thread
            self._stop.set()
        if thread is not None:
            thread.join()
        with self._changed:
            self._error = None

    def _settled(self) -> bool:
        return self._planned[0].found is not None or self._error is not None

    # On the thread.

    def _next(self) -> PlannedRound[T] | None:
        return next((one for one in self._planned if one.found is None), None)

    def _work(self, stop: threading.Event) -> None:
        def look() -> None:
            if stop.is_set():
                raise _Stopped

        error: BaseException | None = None
        try:
            while True:
                with self._changed:
                    planned = self._next()
                    if planned is None or stop.is_set():
                        self._thread = None
                        return
                found = self._sample(planned, look)
                with self._changed:
                    planned.found = found
                    self._changed.notify_all()
        except _Stopped:
            pass
        except BaseException as raised:
            error = raised
        with self._changed:
            self._thread = None
            self._error = error
            self._changed.notify_all()
