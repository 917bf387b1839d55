"""Shape of a load: what each request is, and when it starts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

_LEAST_ID, _WORDS = 200, ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world")
"""Lowest token id of a random prompt, where vocabularies have their control tokens no more; words of a random chat."""
_VOCABULARY = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Whole numbers from ``low`` to ``high``, both included.

    Raises:
        ValueError: less than 1, or the wrong way round.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"a range is N or LOW-HIGH with 1 <= LOW <= HIGH, got {self.low}-{self.high}")

    @classmethod
    def parse(cls, text: str) -> Range:
        """Range of "512" or "128-512"."""
        low, dash, high = text.partition("-")
        try:
            return cls(low=int(low), high=int(high if dash else low))
        except ValueError as error:
            raise ValueError(f"a range is N or LOW-HIGH with 1 <= LOW <= HIGH, got {text!r}") from error

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A load.

    Raises:
        ValueError: neither or both of concurrency and rate, or numbers that no load has.
    """

    requests: int
    prompt_tokens: Range
    max_tokens: Range
    concurrency: int | None = None
    """Closed loop: so many at a time, the next one begins when one ends."""
    rate: float | None = None
    """Open loop: so many a second begin, however many are unanswered; a Poisson process."""
    shared_prefix: int = 0
    """Tokens at the beginning of every prompt that are the same for all."""
    api: Literal["completions", "chat"] = "completions"
    ignore_eos: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a load has either a concurrency (closed loop) or a rate (open loop)")
        if self.requests < 1 or (self.concurrency or 1) < 1 or (self.rate or 1.0) <= 0 or self.shared_prefix < 0:
            raise ValueError("requests, concurrency and rate are positive, the shared prefix is not negative")
        if self.shared_prefix > self.prompt_tokens.low:
            raise ValueError(f"the shared prefix ({self.shared_prefix}) is longer than the shortest prompt")

    def bodies(self, model: str) -> Iterator[dict[str, Any]]:
        """Bodies of the requests, the same for the same seed."""
        rng = random.Random(self.seed)
        prefix = [self._piece(rng) for _ in range(self.shared_prefix)]
        for _ in range(self.requests):
            prompt = prefix + [self._piece(rng) for _ in range(self.prompt_tokens.draw(rng) - self.shared_prefix)]
            body: dict[str, Any] = {
                "model": model,
                "max_tokens": self.max_tokens.draw(rng),
                "temperature": 1,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            if self.ignore_eos:
                # Servers of open models take both; with their ids, tokens that are no text are events, too.
                body |= {"ignore_eos": True, "return_token_ids": True}
            if self.api == "chat":
                body["messages"] = [{"role": "user", "content": " ".join(map(str, prompt))}]
            else:
                body["prompt"] = prompt
            yield body

    def starts(self) -> list[float]:
        """Seconds from the beginning at which each request of an open loop starts."""
        if self.rate is None:
            raise ValueError("a closed loop has no schedule")
        rng, now, starts = random.Random(self.seed + 1), 0.0, []
        for _ in range(self.requests):
            starts.append(now)
            now += rng.expovariate(self.rate)
        return starts

    def _piece(self, rng: random.Random) -> int | str:
        return rng.choice(_WORDS) if self.api == "chat" else rng.randrange(_LEAST_ID, _VOCABULARY)
