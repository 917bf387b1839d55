"""How long loads take, by those of late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.engine.kv_cache.keys import Tier

_GAIN = 0.3
"""Of a new measurement. The first one of a tier counts as a whole, the second as half: before, there is but a guess."""
_MOST = 8.0
"""A measurement counts as at most so many times what was expected, or as that part of it: a hiccup is no rule."""
_HALF_LIFE = 60.0
"""Seconds without a measurement after which half of what was learnt to be slower than the guess is forgotten. Of a tier
that is thought slow nothing is loaded, so it would be thought slow forever."""


@dataclass(slots=True)
class _Line:
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
        self._lines: Mapping[Tier, _Line] = {
            Tier.HOST: _Line(100e-6, 1 / host_rate, measured=2),  # buses differ less than disks
            Tier.DISK: _Line(1e-3, 1 / 3e9, measured=0),
            Tier.STORE: _Line(20e-3, 1 / 0.3e9, measured=0),
        }

    def seconds(self, tier: Tier, size: int) -> float:
        """From now until so many bytes of this tier are on the device, what is under way before them included."""
        at, host = self._clock(), self._lines[Tier.HOST]
        total = host.seconds(size + host.queued, at)
        if tier is not Tier.HOST:
            line = self._lines[tier]
            total += line.seconds(size + line.queued, at)
        return total

    def price(self, tier: Tier, size: int) -> float:
        """What a load of so many bytes takes where nothing else is under way."""
        at = self._clock()
        host = self._lines[Tier.HOST].seconds(size, at)
        return host if tier is Tier.HOST else host + self._lines[tier].seconds(size, at)

    def measured(self, tier: Tier, size: int, seconds: float) -> None:
        """Bytes came from this tier to the host, or from the host to the device, in so much time."""
        with self._lock:
            line, at = self._lines[tier], self._clock()
            latency, rate = line.now(at)
            expected = latency + rate * size
            error = min(max(seconds / expected, 1 / _MOST), _MOST) - 1
            share = latency / expected
            line.measured += 1
            gain = max(_GAIN, 1 / line.measured)
            line.latency = latency * (1 + gain * error * share)
            line.rate = rate * (1 + gain * error * (1 - share))
            line.at = at

    def late(self, tier: Tier, seconds: float) -> None:
        """Of what is under way from this tier, some has not come in so much time: it all takes at least as long."""
        size = self._lines[tier].queued
        if seconds > self._lines[tier].seconds(size, self._clock()):
            self.measured(tier, size, seconds)

    def begin(self, tier: Tier, size: int) -> None:
        """So many bytes are to come from this tier."""
        with self._lock:
            self._lines[tier].queued += size

    def end(self, tier: Tier, size: int) -> None:
        """They have come, or will not."""
        with self._lock:
            self._lines[tier].queued -= size
