"""The generic cell rate algorithm, in whole numbers: a bucket that leaks.

ITU-T I.371 and ATM Forum TM 4.0 define it twice: "virtual scheduling" keeps the time at which the bucket will be empty,
the "continuous-state leaky bucket" its level. They admit the same; the level is kept here, because a correction after
the fact is a subtraction then. It starts empty, holds a minute's worth, and leaks a limit's worth each minute: what was
admitted in any time t is at most limit * (1 + t / minute).

A bucket counts in units of which one token (or request) has MINUTE and which leak by ``limit`` each microsecond, so
that no step ever rounds: here ints, in Redis doubles, which are exact up to 2^53. The largest limit, 10^8, fills
6 * 10^15 of 9 * 10^15. services/gateway/rate_limits/lua.py does the same in Lua.
"""

from __future__ import annotations

from dataclasses import dataclass

MINUTE = 60_000_000
"""Microseconds; also units of one token."""


@dataclass(slots=True)
class Bucket:
    """A level as it was at a time."""

    level: int = 0
    at: int = 0

    def leak(self, limit: int, now: int) -> None:
        """Brings the level to ``now``. A clock that went back leaks nothing."""
        self.level = max(0, self.level - max(0, now - self.at) * limit)
        self.at = now

    def wait(self, limit: int, cost: int) -> int:
        """Microseconds until ``cost`` fits; 0: it fits."""
        excess = self.level + cost * MINUTE - limit * MINUTE
        return -(-excess // limit) if excess > 0 else 0

    def add(self, cost: int) -> None:
        """Fills the bucket, also above its brim; a negative cost empties it, but not below its ground."""
        self.level = max(0, self.level + cost * MINUTE)

    def remaining(self, limit: int) -> int:
        """What fits now."""
        return max(0, limit * MINUTE - self.level) // MINUTE

    def empty_in(self, limit: int) -> int:
        """Microseconds until everything fits again."""
        return -(-self.level // limit)
