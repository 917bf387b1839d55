"""Answers of a rate limiter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dimension = Literal["requests", "tokens", "concurrency"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one caller; 0: none."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_requests: int = 0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    @property
    def any(self) -> bool:
        """There is something to limit."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrent_requests)


@dataclass(frozen=True, slots=True)
class Level:
    """Level of one bucket: what fits now, and microseconds until it is empty."""

    remaining: int
    empty_in: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision on whether a request may go on.

    ``by``: the limit that refuses it. ``wait``: microseconds after which the limit may let it pass.
    """

    by: Dimension | None
    wait: int
    requests: Level | None
    tokens: Level | None
