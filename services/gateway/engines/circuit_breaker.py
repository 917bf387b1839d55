"""A circuit breaker per engine: one that fails again and again gets nothing for a while, then one request to prove
itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum


class BreakerState(IntEnum):
    """State of a circuit breaker: what the engine is sent. The numbers are those of the metric."""

    CLOSED = 0
    """Requests."""
    HALF_OPEN = 1
    """One request at a time, until one is answered."""
    OPEN = 2
    """Nothing."""


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """Policy of a circuit breaker: when it opens and for how long.

    Args:
        failures: in a row.
        window_seconds: failures further apart than this are not in a row.
        open_seconds: the first time; doubled each time that the probe fails.
        longest_seconds: at most.

    Raises:
        ValueError: a number makes no sense.
    """

    failures: int
    window_seconds: float
    open_seconds: float
    longest_seconds: float

    def __post_init__(self) -> None:
        if self.failures < 1 or self.window_seconds <= 0 or not 0 < self.open_seconds <= self.longest_seconds:
            raise ValueError(
                f"failures {self.failures} must be at least 1, window_seconds {self.window_seconds} positive and "
                f"open_seconds {self.open_seconds} positive and at most longest_seconds {self.longest_seconds}"
            )


class CircuitBreaker:
    """Circuit breaker of one engine: keeps requests from it for a while after failures in a row.

    Only what is the engine's own fault counts: steps that failed, requests lost with its stream, and those that it has
    no memory, thread or file handle for. Any other refusal (full, draining, a bad request) says nothing about it.

    Args:
        policy: when it opens.
        clock: seconds; never runs backwards.
    """

    def __init__(self, policy: BreakerPolicy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._failures = 0
        self._last_failure = float("-inf")
        self._openings = 0
        """Openings in a row, without a request that was finished in between."""
        self._open_until: float | None = None
        """None: closed."""
        self._probe: str | None = None
        """The request that is to prove that the engine works."""

    @property
    def state(self) -> BreakerState:
        """State as of now."""
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._open_until else BreakerState.HALF_OPEN

    @property
    def admits(self) -> bool:
        """True if the engine may be given a request."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._probe is None)

    @property
    def badness(self) -> float:
        """Key of the order in which engines are tried when none is admitted, the smallest first."""
        return float("-inf") if self._open_until is None else self._open_until

    def sent(self, request_id: str) -> None:
        """A request went there."""
        if self._open_until is not None:
            self._probe = request_id

    def answered(self, request_id: str) -> None:
        """The first tokens of a request came back: as a probe it has done its work."""
        if request_id == self._probe:
            self._open_until = self._probe = None
            self._failures = 0

    def finished(self, request_id: str) -> None:
        """A request got its whole answer."""
        self.answered(request_id)
        if self._open_until is None:
            self._failures = self._openings = 0

    def dropped(self, request_id: str) -> None:
        """A request ended without saying anything about the engine: refused, or nobody waits for it any more."""
        if request_id == self._probe:
            self._probe = None

    def failed(self) -> None:
        """The engine failed once, however many requests that cost. Of one that is open already it is no news, except
        that its probe has failed."""
        now = self._clock()
        if self._open_until is not None:
            if self._probe is not None:
                self._open(now)
            return
        in_a_row = now - self._last_failure <= self._policy.window_seconds
        self._failures = self._failures + 1 if in_a_row else 1
        self._last_failure = now
        if self._failures >= self._policy.failures:
            self._open(now)

    def _open(self, now: float) -> None:
        # Beyond 2**30 times the first pause nothing is doubled any more, whatever the longest is.
        pause = self._policy.open_seconds * 2.0 ** min(self._openings, 30)
        self._open_until = now + min(pause, self._policy.longest_seconds)
        self._openings += 1
        self._probe = None
        self._failures = 0
