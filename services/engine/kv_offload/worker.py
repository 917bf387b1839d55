"""Workers of the tiers: threads, the log of failed copies, and the measured bandwidth of each tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TypeAlias

import structlog

from services.engine.kv_cache.keys import Tier
from services.engine.observability.events import CopyFailure, CopyNotMade, EventStream

Call: TypeAlias = Callable[[], None]

log = structlog.get_logger(__name__)


def _nothing() -> None:
    pass


class Worker:
    """Worker threads with a priority queue: the lowest rank first, equal ranks in order. Each call is answered: if it
    raises, that is logged and its ``failed`` is called, as for calls that still wait when the worker closes.
    Thread-safe.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._ready: list[tuple[int, int, Call, Call]] = []
        self._later: list[tuple[float, int, int, Call, Call]] = []
        self._numbers = count()
        self._running = 0
        self._given = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, call: Call, *, rank: int = 0, at: float = 0.0, failed: Call = _nothing) -> None:
        """Queues a call, to run soon or at a time of time.monotonic()."""
        with self._changed:
            if not self._closed:
                if at > time.monotonic():
                    heappush(self._later, (at, next(self._numbers), rank, call, failed))
                else:
                    heappush(self._ready, (rank, next(self._numbers), call, failed))
                    self._given += 1
                self._changed.notify_all()
                return
        self._safely(failed)

    @property
    def given(self) -> int:
        """Calls that a thread was free to take, since the start."""
        return self._given

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a thread, without those for later."""
        return len(self._ready)

    def wait_idle(self, until: float) -> bool:
        """Waits until no call runs or waits for a thread; False: one does at ``until``, a time of time.monotonic()."""
        with self._changed:
            while self._ready or self._running:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def cancel(self, rank: int) -> None:
        """Cancels the waiting calls of this rank or a higher one."""
        with self._changed:
            left = [entry[3] for entry in self._ready if entry[0] >= rank]
            self._ready = [entry for entry in self._ready if entry[0] < rank]
            heapify(self._ready)
        for failed in left:
            self._safely(failed)

    def close(self, until: float) -> bool:
        """Ends the threads after their present calls; False: one still runs at ``until``."""
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
        """Waits for the next call; returns it with its ``failed``, or None when closed."""
        while not self._closed:
            now = time.monotonic()
            while self._later and self._later[0][0] <= now:
                _, number, rank, call, failed = heappop(self._later)
                heappush(self._ready, (rank, number, call, failed))
                self._given += 1
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


def wait_all_idle(workers: Sequence[Worker], until: float) -> bool:
    """Waits until no worker has anything to do, what they give each other included; False: one has at ``until``, a time
    of time.monotonic()."""
    while True:
        given = [worker.given for worker in workers]
        if not all(worker.wait_idle(until) for worker in workers):
            return False
        if given == [worker.given for worker in workers]:  # no worker has given another one work meanwhile
            return True


_LOG_SECONDS = 10.0
"""Seconds between two log lines about the same failure of the same tier."""


class CopyFailed(Exception):
    """Failure to read or write a copy."""

    def __init__(self, reason: CopyFailure, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class FailureLog:
    """Counts and logs copies that could not be made. Thread-safe."""

    def __init__(self, events: EventStream) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._logged_at: dict[tuple[Tier, CopyFailure], float] = {}
        self._suppressed: dict[tuple[Tier, CopyFailure], int] = {}

    def record(self, tier: Tier, reason: CopyFailure, message: str) -> None:
        """Counts a failure, and logs it unless one like it was logged shortly before."""
        self._events.emit(CopyNotMade(tier, reason))
        kind, now = (tier, reason), time.monotonic()
        with self._lock:
            if now < self._logged_at.get(kind, -_LOG_SECONDS) + _LOG_SECONDS:
                self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
                return
            self._logged_at[kind] = now
            suppressed = self._suppressed.pop(kind, 0)
        log.warning("tier_copy_failed", tier=tier.value, reason=reason, error=message, suppressed=suppressed)


_GAIN = 0.3
"""Weight of a new measurement. The first one of a tier counts whole and the second half, because before them there is
only an estimate."""


_MOST = 8.0
"""Limit of the ratio between a measured and the expected time, in both directions, against outliers."""


_HALF_LIFE = 60.0
"""Seconds without a measurement after which half of the slowness beyond the first estimate is forgotten. Nothing is
loaded from a tier that seems slow, so it would seem slow forever."""


@dataclass(slots=True)
class _TierSpeed:
    latency: float
    """Latency, seconds."""
    rate: float
    """Seconds for each byte."""
    measured: int
    """Number of measurements; a good first estimate counts as some."""
    estimate: tuple[float, float] = (0.0, 0.0)
    """First estimate of latency and rate."""
    at: float = 0.0
    """Time of the last measurement."""
    queued: int = 0
    """Bytes of the loads in progress."""

    def __post_init__(self) -> None:
        self.estimate = (self.latency, self.rate)

    def now(self, at: float) -> tuple[float, float]:
        """Latency and rate, with slowness decayed since the last measurement."""
        belief = 0.5 ** ((at - self.at) / _HALF_LIFE)
        latency, rate = self.estimate
        return (
            min(self.latency, latency) + max(0.0, self.latency - latency) * belief,
            min(self.rate, rate) + max(0.0, self.rate - rate) * belief,
        )

    def seconds(self, size: int, at: float) -> float:
        latency, rate = self.now(at)
        return latency + rate * size


class Bandwidth:
    """Latency and bandwidth of each tier. Thread-safe; reading takes no lock.

    An error of the expected time is attributed to latency and bandwidth by their shares of it. So small loads correct
    the latency and large ones the bandwidth.

    Args:
        host_rate: first estimate of the bytes a second between host memory and the device.
        clock: monotonic seconds.
    """

    def __init__(self, host_rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._speeds: Mapping[Tier, _TierSpeed] = {
            Tier.HOST: _TierSpeed(100e-6, 1 / host_rate, measured=2),  # buses differ less than disks
            Tier.DISK: _TierSpeed(1e-3, 1 / 3e9, measured=0),
            Tier.STORE: _TierSpeed(20e-3, 1 / 0.3e9, measured=0),
        }

    def seconds(self, tier: Tier, size: int) -> float:
        """Seconds until so many bytes of a tier are on the device, with the loads in progress before them."""
        at, host = self._clock(), self._speeds[Tier.HOST]
        total = host.seconds(size + host.queued, at)
        if tier is not Tier.HOST:
            speed = self._speeds[tier]
            total += speed.seconds(size + speed.queued, at)
        return total

    def price(self, tier: Tier, size: int) -> float:
        """Seconds that a load of so many bytes takes when no other is in progress."""
        at = self._clock()
        host = self._speeds[Tier.HOST].seconds(size, at)
        return host if tier is Tier.HOST else host + self._speeds[tier].seconds(size, at)

    def measured(self, tier: Tier, size: int, seconds: float) -> None:
        """Learns from bytes that came from a tier to the host, or from the host to the device, in so many seconds."""
        with self._lock:
            speed, at = self._speeds[tier], self._clock()
            latency, rate = speed.now(at)
            expected = latency + rate * size
            error = min(max(seconds / expected, 1 / _MOST), _MOST) - 1
            share = latency / expected
            speed.measured += 1
            gain = max(_GAIN, 1 / speed.measured)
            speed.latency = latency * (1 + gain * error * share)
            speed.rate = rate * (1 + gain * error * (1 - share))
            speed.at = at

    def late(self, tier: Tier, seconds: float) -> None:
        """Learns that the loads in progress from a tier take at least so many seconds together."""
        size = self._speeds[tier].queued
        if seconds > self._speeds[tier].seconds(size, self._clock()):
            self.measured(tier, size, seconds)

    def begin(self, tier: Tier, size: int) -> None:
        """Counts bytes of a load that begins."""
        with self._lock:
            self._speeds[tier].queued += size

    def end(self, tier: Tier, size: int) -> None:
        """Counts bytes of a load that has ended."""
        with self._lock:
            self._speeds[tier].queued -= size
