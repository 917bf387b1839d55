"""Side work of the trainer thread (training sessions), and how it shares the thread's time with jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol


class SideWork(Protocol):
    """Small pieces of work for the trainer thread (services.trainer.training_sessions.manager)."""

    def bind(self, wake: Callable[[], None]) -> None:
        """``wake`` is to be called when there is something to do."""
        ...

    @property
    def ready(self) -> bool:
        """Whether there is."""
        ...

    def run_next(self) -> bool:
        """Does one piece; False if there is none. Never raises."""
        ...

    def sweep(self) -> None:
        """Called now and then."""
        ...


class NoSideWork:
    """There is never anything."""

    def bind(self, wake: Callable[[], None]) -> None:
        """Nobody is to be woken."""

    @property
    def ready(self) -> bool:
        return False

    def run_next(self) -> bool:
        return False

    def sweep(self) -> None:
        """Nothing gets old."""


class Pauses:
    """A job's interrupt: asks whether the job may go on, then gives side work as much time as the job has had since
    the last pause, at least one piece. So neither waits for more than a microbatch or a piece, and each gets half.

    Args:
        check: raises if the job must not go on.
        clock: monotonic seconds.
    """

    def __init__(self, check: Callable[[], None], side: SideWork, clock: Callable[[], float] = time.monotonic) -> None:
        self._check = check
        self._side = side
        self._clock = clock
        self._resumed = clock()

    def __call__(self) -> None:
        self._check()
        if not self._side.ready:
            self._side.sweep()
            self._resumed = self._clock()
            return
        paused = self._clock()
        share = paused - self._resumed
        while self._side.run_next() and self._clock() - paused < share:
            self._check()
        self._check()
        self._resumed = self._clock()


def work_or_wait(side: SideWork, awake: threading.Event, seconds: float) -> None:
    """Does a piece of side work, or waits so long for ``awake``, which the caller cleared before it looked for other
    work."""
    if not side.run_next():
        side.sweep()
        awake.wait(seconds)
