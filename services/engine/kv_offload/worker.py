"""What the tiers run on: worker threads, the log of failed copies, and the measured bandwidth of each tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
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

    def cancel(self, rank: int) -> None:
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


_LOG_SECONDS = 10.0
"""Seconds between two log lines about the same failure of the same tier."""


class CopyFailed(Exception):
    """A copy could not be read or written."""

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
        """Counts one, and logs it unless another like it was logged a moment ago."""
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
"""Of a new measurement. The first one of a tier counts as a whole, the second as half: before, there is but a guess."""


_MOST = 8.0
"""A measurement counts as at most so many times what was expected, or as that part of it: a hiccup is no rule."""


_HALF_LIFE = 60.0
"""Seconds without a measurement after which half of what was learnt to be slower than the guess is forgotten. Of a tier
that is thought slow nothing is loaded, so it would be thought slow forever."""


@dataclass(slots=True)
class _TierSpeed:
    latency: float
    """Seconds."""
    rate: float
    """Seconds a byte."""
    measured: int
    """How often it was; some guesses are as good as measurements."""
    guess: tuple[float, float] = (0.0, 0.0)
    """Latency and rate before anything was measured."""
    at: float = 0.0
    """When it was measured last."""
    queued: int = 0
    """Bytes that are under way."""

    def __post_init__(self) -> None:
        self.guess = (self.latency, self.rate)

    def now(self, at: float) -> tuple[float, float]:
        """Latency and rate, as far as they are still believed."""
        belief = 0.5 ** ((at - self.at) / _HALF_LIFE)
        latency, rate = self.guess
        return (
            min(self.latency, latency) + max(0.0, self.latency - latency) * belief,
            min(self.rate, rate) + max(0.0, self.rate - rate) * belief,
        )

    def seconds(self, size: int, at: float) -> float:
        latency, rate = self.now(at)
        return latency + rate * size


class Bandwidth:
    """Latency and bandwidth of each tier. Thread-safe; reading takes no lock.

    An error of what was expected is put down to latency and bandwidth by their shares of it, so small loads correct the
    one and large loads the other.

    Args:
        host_rate: bytes a second between host memory and the device, as a first guess.
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
        """From now until so many bytes of this tier are on the device, what is under way before them included."""
        at, host = self._clock(), self._speeds[Tier.HOST]
        total = host.seconds(size + host.queued, at)
        if tier is not Tier.HOST:
            speed = self._speeds[tier]
            total += speed.seconds(size + speed.queued, at)
        return total

    def price(self, tier: Tier, size: int) -> float:
        """What a load of so many bytes takes where nothing else is under way."""
        at = self._clock()
        host = self._speeds[Tier.HOST].seconds(size, at)
        return host if tier is Tier.HOST else host + self._speeds[tier].seconds(size, at)

    def measured(self, tier: Tier, size: int, seconds: float) -> None:
        """Bytes came from this tier to the host, or from the host to the device, in so much time."""
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
        """Of what is under way from this tier, some has not come in so much time: it all takes at least as long."""
        size = self._speeds[tier].queued
        if seconds > self._speeds[tier].seconds(size, self._clock()):
            self.measured(tier, size, seconds)

    def begin(self, tier: Tier, size: int) -> None:
        """So many bytes are to come from this tier."""
        with self._lock:
            self._speeds[tier].queued += size

    def end(self, tier: Tier, size: int) -> None:
        """They have come, or will not."""
        with self._lock:
            self._speeds[tier].queued -= size
