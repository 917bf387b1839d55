"""Threads that do what they are given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TypeAlias

import structlog

Call: TypeAlias = Callable[[], None]

log = structlog.get_logger(__name__)


def _nothing() -> None:
    pass


class Worker:
    """Does calls in threads of its own, the lowest rank first and equal ones in their order. A call that raises is
    logged, and its ``failed`` is called, as it is for what is still waiting when the worker closes: so each call is
    answered. Thread-safe.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._ready: list[tuple[int, int, Call, Call]] = []
        self._later: list[tuple[float, int, int, Call, Call]] = []
        self._numbers = count()
        self._running = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, call: Call, *, rank: int = 0, at: float = 0.0, failed: Call = _nothing) -> None:
        """Does it soon, or at a time of time.monotonic()."""
        with self._changed:
            if not self._closed:
                if at > time.monotonic():
                    heappush(self._later, (at, next(self._numbers), rank, call, failed))
                else:
                    heappush(self._ready, (rank, next(self._numbers), call, failed))
                self._changed.notify_all()
                return
        self._safely(failed)

    @property
    def waiting(self) -> int:
        """Calls that wait for a thread; those for later do not count."""
        return len(self._ready)

    def wait_idle(self, until: float) -> bool:
        """Waits until nothing is to do just now; False: there still was at that time of time.monotonic()."""
        with self._changed:
            while self._ready or self._running:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def forgo(self, rank: int) -> None:
        """Leaves undone what waits with this rank or a higher one."""
        with self._changed:
            left = [entry[3] for entry in self._ready if entry[0] >= rank]
            self._ready = [entry for entry in self._ready if entry[0] < rank]
            heapify(self._ready)
        for failed in left:
            self._safely(failed)

    def close(self, until: float) -> bool:
        """Ends the threads when they have done what they are doing; False: one still does at that time."""
        with self._changed:
            self._closed = True
            left = [entry[3] for entry in self._ready] + [entry[4] for entry in self._later]
            self._ready.clear()
            self._later.clear()
            self._changed.notify_all()
        for failed in left:
            self._safely(failed)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while True:
            with self._changed:
                task = self._take()
                if task is None:
                    return
                self._running += 1
            try:
                if not self._safely(task[0]):
                    self._safely(task[1])
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    def _take(self) -> tuple[Call, Call] | None:
        """The next call and its answer to a failure, None when closed. Waits."""
        while not self._closed:
            now = time.monotonic()
            while self._later and self._later[0][0] <= now:
                _, number, rank, call, failed = heappop(self._later)
                heappush(self._ready, (rank, number, call, failed))
            if self._ready:
                _, _, call, failed = heappop(self._ready)
                return call, failed
            self._changed.wait(self._later[0][0] - now if self._later else None)
        return None

    def _safely(self, call: Call) -> bool:
        try:
            call()
        except Exception:
            log.exception("tier_worker_failed", worker=self._name)
            return False
        return True
