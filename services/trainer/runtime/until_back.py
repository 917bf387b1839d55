"""Patience of an attempt: what needs a store is repeated while that is away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from services.common.errors import Unavailable, scarce
from services.trainer.memory.budget import MemoryTaken
from services.trainer.runtime.interleaving import SideWork, work_or_wait
from services.trainer.runtime.job_link import JobSession

BACKOFF_SECONDS = (0.25, 5.0)
"""First and longest pause between attempts to reach a store that is away."""

_SCARCE_SECONDS = 60.0
"""Longest pause of an attempt before another one where the system gives no memory, threads or file handles."""

T = TypeVar("T")


class UntilBack:
    """Repeats operations of one job while a store is away, or memory taken.

    Args:
        session: the job's line to Redis.
        side: work that the thread does in the pauses.
        draining: set when the process shuts down.
        awake: set when the thread has something to do in a pause.
        meanwhile: lets jobs that run at the same time go on by a step; False if none can.
    """

    def __init__(
        self,
        session: JobSession,
        side: SideWork,
        draining: threading.Event,
        awake: threading.Event,
        log: structlog.stdlib.BoundLogger,
        meanwhile: Callable[[], bool] = lambda: False,
    ) -> None:
        self._session = session
        self._side = side
        self._draining = draining
        self._awake = awake
        self._log = log
        self._meanwhile = meanwhile

    def __call__(
        self,
        operation: Callable[[], T],
        *,
        away: Callable[[], None] | None = None,
        cancellable: bool = True,
    ) -> T:
        """What the operation returns. Raises JobLost, JobCancelled, Draining.

        Args:
            away: called once, when the operation has failed for the first time.
        """
        pause, longest = BACKOFF_SECONDS
        first = True
        while True:
            self._session.check(cancellable=cancellable)
            try:
                return operation()
            except Unavailable as error:
                if first:
                    first = False
                    event = "memory.taken" if isinstance(error, MemoryTaken) else "store.away"
                    self._log.warning(event, error=error.message)
                    self._session.event("log", {"message": f"waiting: {error.message}"})
                    if away is not None:
                        away()
            self._pause(pause)
            pause = min(2 * pause, longest)

    def await_resources(self, error: Exception, attempt: int) -> None:
        """A pause behind an attempt that ended with nothing_left(), the longer the more there have been: what took
        memory, threads or file handles of this machine may have gone then. Raises JobLost, JobCancelled, Draining."""
        self._log.warning("resources.scarce", attempt=attempt, exc_info=error)
        error.with_traceback(None)  # whose frames hold memory of the attempt
        self._session.event("log", {"message": f"waiting: this engine gets no {scarce(error)} from its machine"})
        first, longest = BACKOFF_SECONDS
        until = time.monotonic() + min(first * 2**attempt, _SCARCE_SECONDS)
        while (left := until - time.monotonic()) > 0:
            self._session.check()
            self._pause(min(left, longest))

    def _pause(self, seconds: float) -> None:
        """Waits, and does side work meanwhile, or lets other jobs go on."""
        until = time.monotonic() + seconds
        while not self._draining.is_set() and (left := until - time.monotonic()) > 0:
            self._awake.clear()
            if not self._meanwhile():
                work_or_wait(self._side, self._awake, left)
