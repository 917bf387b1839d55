"""Takes sessions' programs from part to part: what computes to the trainer thread, what waits to other threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import structlog

from services.common.errors import Unavailable
from services.trainer.training_sessions.programs import Compute, Program
from services.trainer.training_sessions.session import TrainingSession

Told: TypeAlias = list[Callable[[], None]]
"""Callbacks for calls that have ended, to be called outside of any lock."""


class Driver:
    """One program of a session at a time; sessions whose next part computes take turns.

    Args:
        lock: guards all sessions; held around ``ended`` and ``released``, and by whoever calls ``start``.
        threads: for what waits.
        ended: a session's program has returned, or raised.
        released: a session that was ended while it computed does not compute any more.
    """

    def __init__(
        self,
        lock: threading.RLock,
        threads: int,
        *,
        ended: Callable[[TrainingSession, Any, BaseException | None], Told],
        released: Callable[[TrainingSession], None],
    ) -> None:
        self._lock = lock
        self._ended = ended
        self._released = released
        self._runnable: deque[TrainingSession] = deque()
        self._threads = ThreadPoolExecutor(max(1, threads), "session")
        self._wake: Callable[[], None] = lambda: None

    def start(self, session: TrainingSession, program: Program) -> Told:
        """Runs a program up to its first part."""
        session.program = program
        return self._advance(session, None, None)

    def shut_down(self) -> None:
        """Nothing that waits is begun any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def bind(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, by any thread, when there is something for run_next."""
        self._wake = wake

    @property
    def ready(self) -> bool:
        """Whether run_next would find something."""
        return bool(self._runnable)

    def run_next(self) -> bool:
        """Computes the next part of the session whose turn it is; False if there is none."""
        with self._lock:
            session = self._runnable.popleft() if self._runnable else None
            if session is None or session.part is None:
                return session is not None
            part, session.part = session.part, None
            session.computing = True
        result, error = None, None
        try:
            result = part.run()
        except Exception as caught:  # whatever it is belongs to this call, and the trainer goes on
            error = caught
        with self._lock:
            session.computing = False
            if session.ended is not None:
                self._released(session)
                return True
            told = self._advance(session, result, error)
        tell(told)
        return True

    def _advance(self, session: TrainingSession, result: Any, error: BaseException | None) -> Told:
        """Sends a part's outcome to the session's program and places its next part. Returns whom to tell."""
        program = session.program
        if program is None:
            raise RuntimeError(f"session {session.id} runs nothing")
        try:
            part = program.throw(error) if error is not None else program.send(result)
        except StopIteration as done:
            return self._ended(session, done.value, None)
        except Exception as caught:  # of this call, whatever it is
            return self._ended(session, None, caught)
        if isinstance(part, Compute):
            session.part = part
            self._runnable.append(session)
            self._wake()
        else:
            run = part.run
            try:
                self._threads.submit(self._fetch, session, run)
            except RuntimeError as shut:  # the threads have ended with the manager
                return self._ended(session, None, Unavailable(f"this engine is shutting down: {shut}"))
        return []

    def _fetch(self, session: TrainingSession, run: Callable[[], Any]) -> None:
        """Runs a part that waits, in a thread for the store and without the lock."""
        result, error = None, None
        try:
            result = run()
        except Exception as caught:
            error = caught
        with self._lock:
            if session.ended is not None:
                return
            told = self._advance(session, result, error)
        tell(told)


def tell(told: Told) -> None:
    """Outside of any lock, and whatever becomes of those who are told."""
    for call in told:
        try:
            call()
        except Exception:  # whoever waits may have gone; the trainer goes on
            structlog.get_logger("sessions").exception("watcher.failed")
