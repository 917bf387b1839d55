"""How long loads take, by those of late."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from services.engine.memory.tiers.ports import Tier

_GAIN = 0.3
"""Of a new measurement."""
_MOST = 8.0
"""A measurement counts as at most so many times what was expected, or as that part of it: a hiccup is no rule."""


@dataclass(slots=True)
class _Line:
    latency: float
    """Seconds."""
    rate: float
    """Seconds a byte."""
    queued: int = 0
    """Bytes that are under way."""

    def seconds(self, size: int) -> float:
        return self.latency + self.rate * size


class Bandwidth:
    """Latency and bandwidth of each tier. Thread-safe; reading takes no lock.

    An error of what was expected is put down to latency and bandwidth by their shares of it, so small loads correct the
    one and large loads the other.

    Args:
        host_rate: bytes a second between host memory and the device, as a first guess.
    """

    def __init__(self, host_rate: float) -> None:
        self._lock = threading.Lock()
        self._lines: Mapping[Tier, _Line] = {
            Tier.HOST: _Line(100e-6, 1 / host_rate),
            Tier.DISK: _Line(1e-3, 1 / 3e9),
            Tier.STORE: _Line(20e-3, 1 / 0.3e9),
        }

    def seconds(self, tier: Tier, size: int) -> float:
        """From now until so many bytes of this tier are on the device, what is under way before them included."""
        host = self._lines[Tier.HOST]
        total = host.seconds(size + host.queued)
        if tier is not Tier.HOST:
            line = self._lines[tier]
            total += line.seconds(size + line.queued)
        return total

    def price(self, tier: Tier, size: int) -> float:
        """What a load of so many bytes takes where nothing else is under way."""
        host = self._lines[Tier.HOST].seconds(size)
        return host if tier is Tier.HOST else host + self._lines[tier].seconds(size)

    def measured(self, tier: Tier, size: int, seconds: float) -> None:
        """Bytes came from this tier to the host, or from the host to the device, in so much time."""
        with self._lock:
            line = self._lines[tier]
            expected = line.seconds(size)
            error = min(max(seconds / expected, 1 / _MOST), _MOST) - 1
            share = line.latency / expected
            line.latency *= 1 + _GAIN * error * share
            line.rate *= 1 + _GAIN * error * (1 - share)

    def begin(self, tier: Tier, size: int) -> None:
        """So many bytes are to come from this tier."""
        with self._lock:
            self._lines[tier].queued += size

    def end(self, tier: Tier, size: int) -> None:
        """They have come, or will not."""
        with self._lock:
            self._lines[tier].queued -= size
