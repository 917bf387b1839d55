"""Rate limits in the memory of one gateway, by the generic cell rate algorithm in whole numbers: a bucket that leaks.

ITU-T I.371 and ATM Forum TM 4.0 define it twice: "virtual scheduling" keeps the time at which the bucket will be empty,
the "continuous-state leaky bucket" its level. They admit the same; the level is kept here, because a correction after
the fact is a subtraction then. It starts empty, holds a minute's worth, and leaks a limit's worth each minute: what was
admitted in any time t is at most limit * (1 + t / minute).

A bucket counts in units of which one token (or request) has MINUTE and which leak by ``limit`` each microsecond, so
that no step ever rounds: here ints, in Redis doubles, which are exact up to 2^53. The largest limit, 10^8, fills
6 * 10^15 of 9 * 10^15. services/gateway/rate_limits/redis_limiter.py does the same in Lua.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.gateway.rate_limits.limits import Decision, Dimension, Level, Limits

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
        """Amount that fits now."""
        return max(0, limit * MINUTE - self.level) // MINUTE

    def empty_in(self, limit: int) -> int:
        """Microseconds until everything fits again."""
        return -(-self.level // limit)


BUSY_WAIT = 1_000_000
"""Microseconds that a caller with too many requests at a time is told to wait: nobody knows when one of them ends."""


@dataclass(slots=True)
class _Caller:
    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    leases: set[str] = field(default_factory=set)


class MemoryLimiter:
    """Limiter that decides as RedisLimiter does in Redis, about the requests that this gateway has seen."""

    def __init__(self) -> None:
        self._callers: dict[str, _Caller] = {}

    def acquire(self, caller: str, limits: Limits, lease: str, now: int, *, force: bool = False) -> Decision:
        """Counts a request and takes a lease, or does nothing.

        Args:
            now: microseconds of any clock that only runs forward.
            force: it is decided already; count it in any case.
        """
        state = self._callers.setdefault(caller, _Caller())
        rate, tokens = limits.requests_per_minute, limits.tokens_per_minute
        state.requests.leak(rate, now)
        state.tokens.leak(tokens, now)
        refused: tuple[Dimension, int] | None = None
        if limits.concurrent_requests and len(state.leases) >= limits.concurrent_requests:
            refused = "concurrency", BUSY_WAIT
        elif rate and (wait := state.requests.wait(rate, 1)):
            refused = "requests", wait
        elif tokens and (wait := state.tokens.wait(tokens, 1)):
            refused = "tokens", wait
        if refused is None or force:
            if limits.concurrent_requests:
                state.leases.add(lease)
            if rate:
                state.requests.add(1)
        by, wait = (None, 0) if force or refused is None else refused
        return Decision(by, wait, _level(state.requests, rate), _level(state.tokens, tokens))

    def take(self, caller: str, limits: Limits, tokens: int, now: int, *, force: bool = False) -> Decision:
        """Reserves tokens, or does nothing."""
        state = self._callers.setdefault(caller, _Caller())
        state.tokens.leak(limits.tokens_per_minute, now)
        wait = 0 if force else state.tokens.wait(limits.tokens_per_minute, tokens)
        if not wait:
            state.tokens.add(tokens)
        return Decision("tokens" if wait else None, wait, None, _level(state.tokens, limits.tokens_per_minute))

    def correct(self, caller: str, limits: Limits, tokens: int, now: int) -> None:
        """Adds tokens that were used beyond a reservation; negative: gives back what was not."""
        state = self._callers.setdefault(caller, _Caller())
        state.tokens.leak(limits.tokens_per_minute, now)
        state.tokens.add(tokens)

    def release(self, caller: str, lease: str) -> None:
        """A request is over."""
        if (state := self._callers.get(caller)) is not None:
            state.leases.discard(lease)

    def leases(self) -> dict[str, set[str]]:
        """The requests that run, by caller."""
        return {caller: set(state.leases) for caller, state in self._callers.items() if state.leases}


def _level(bucket: Bucket, limit: int) -> Level | None:
    return Level(bucket.remaining(limit), bucket.empty_in(limit)) if limit else None
