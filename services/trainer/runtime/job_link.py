"""One claimed job's line to Redis: heartbeats and reports, in a thread that never waits for the computation.

The computing thread never touches Redis: it leaves its reports here and asks whether it may go on. While Redis is away
reports wait in memory and training continues.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import redis
import structlog

from services.common.errors import DeadlineExceeded, Overloaded, Unavailable
from services.common.jobs import JobProgress
from services.common.queue.consumer import ClaimedJob, EventKind, JobConsumer, JobLost

_BUFFERED = 10_000
"""Reports kept while Redis is away, as many as a job's event stream holds; the oldest go first."""
_AWAY_SECONDS = 0.5
PASSING = (Unavailable, Overloaded, DeadlineExceeded)
"""Errors that another attempt may not meet again."""


class JobCancelled(Exception):
    """The user asked this job to stop."""


class Draining(Exception):
    """This process is shutting down: hand the job back."""


class Paused(Draining):
    """The user asked this job to pause: hand it back, and the queue keeps it."""


class NotBeside(Exception):
    """The job cannot run beside those that run here: hand it back, for this trainer to take later or another one now.

    Args:
        reason: for the job's user.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class JobSession:
    """Context manager: heartbeats run from ``start``, or from entering it, until it is left.

    Args:
        draining: set when the process shuts down.
    """

    def __init__(
        self, consumer: JobConsumer, claimed: ClaimedJob, *, heartbeat_seconds: float, draining: threading.Event
    ) -> None:
        self._consumer = consumer
        self._claimed = claimed
        self._interval = heartbeat_seconds
        self._draining = draining
        self._log = structlog.get_logger("trainer").bind(job=claimed.id, attempt=claimed.attempt)
        self._pending: deque[Callable[[], None]] = deque(maxlen=_BUFFERED)
        self._numbers = itertools.count(1)
        """Numbers of what is reported: a server that was only slow carries out a report that was sent again as well."""
        self._wake = threading.Condition()
        self._closed = False
        self._lost = False
        self._cancelled = False
        self._paused = False
        self._away = False
        self._ending = False
        self._kept = False
        self._thread = threading.Thread(target=self._run, name="job-session", daemon=True)

    def start(self) -> None:
        """Begins to say that the owner is alive."""
        if self._thread.ident is None:
            self._thread.start()

    def __enter__(self) -> JobSession:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Says no more that the owner is alive. Once more does nothing."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def closed(self) -> bool:
        """Whether nobody says any more that the owner is alive."""
        return self._closed

    @property
    def lost(self) -> bool:
        return self._lost

    def check(self, *, cancellable: bool = True) -> None:
        """Raises JobLost, JobCancelled, Draining or Paused when the job must not go on. A job that cannot be cancelled
        any more is not paused, either."""
        if self._lost:
            raise JobLost(f"job {self._claimed.id} has another owner by now")
        if self._cancelled and cancellable:
            raise JobCancelled
        if self._draining.is_set():
            raise Draining
        if self._paused and cancellable:
            raise Paused

    def fence(self) -> None:
        """Proves the ownership right now. Raises JobLost or Unavailable."""
        try:
            self._consumer.heartbeat(self._claimed)
        except JobLost:
            self._lost = True
            raise

    def ending(self) -> None:
        """The job's end is about to be written: a heartbeat that comes after it is no news."""
        self._ending = True

    def report(self, progress: JobProgress, metrics: Mapping[str, float]) -> None:
        copy = dict(metrics)
        self._post(lambda number: self._consumer.report(self._claimed, progress, copy, number))

    def describe(
        self,
        settings: Mapping[str, float],
        notes: Sequence[str],
        metrics: Mapping[str, float],
        evaluation: str = "",
        report: str = "",
    ) -> None:
        copies = dict(settings), list(notes), dict(metrics)
        self._post(lambda number: self._consumer.describe(self._claimed, *copies, number, evaluation, report))

    def event(self, kind: EventKind, data: Mapping[str, Any]) -> None:
        copy = dict(data)
        self._post(lambda number: self._consumer.event(self._claimed, kind, copy, number))

    def kept(self) -> None:
        """Says that a part of the work is safe, see JobConsumer.kept; once is enough."""
        if not self._kept:
            self._kept = True
            self._post(lambda _number: self._consumer.kept(self._claimed))

    def flush(self, timeout: float) -> bool:
        """Waits until nothing is left to write; False if Redis stayed away."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._pending or self._lost or not self._thread.is_alive(), timeout)

    def _post(self, write: Callable[[int], None]) -> None:
        with self._wake:
            # In the order in which they are written: the queue takes a smaller number for a repetition.
            self._pending.append(partial(write, next(self._numbers)))
            self._wake.notify_all()

    def _run(self) -> None:
        due = 0.0
        while True:
            try:
                if time.monotonic() >= due:
                    asked = self._consumer.asked(self._claimed)
                    self._cancelled = asked == "CANCEL" or self._cancelled
                    self._paused = asked == "PAUSE"
                    due = time.monotonic() + self._interval
                    self._consumer.adopt_waiting()
                self._write_pending()
                if self._away:
                    self._away = False
                    self._log.info("queue.back")
            except (Unavailable, redis.exceptions.RedisError) as error:  # the latter of a server that is still loading
                self._note_away(error)
            except JobLost as error:
                if not self._ending:
                    self._log.warning("job.lost", error=error.message)
                with self._wake:
                    self._lost = True
                    self._wake.notify_all()
                return
            except Exception:  # a bug must not end the heartbeats: the job would be given to another trainer
                self._log.exception("heartbeat.failed")
                due = time.monotonic() + self._interval
            with self._wake:
                if self._closed:
                    return
                wait = _AWAY_SECONDS if self._away else max(0.0, due - time.monotonic())
                self._wake.wait_for(lambda: self._closed or (bool(self._pending) and not self._away), wait)

    def _note_away(self, error: Exception) -> None:
        if not self._away:
            self._away = True
            self._log.warning("queue.away", error=str(error))

    def _write_pending(self) -> None:
        while True:
            with self._wake:
                if not self._pending:
                    self._wake.notify_all()
                    return
                write = self._pending[0]
            try:
                write()
            except (Unavailable, JobLost):
                raise
            except Exception:  # one unwritable report must not end the heartbeats
                self._log.exception("report.dropped")
            with self._wake:
                if self._pending and self._pending[0] is write:
                    self._pending.popleft()
