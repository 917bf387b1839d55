"""Faults of a campaign: a sequence of what breaks, where, and for how long, that a seed makes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tests.chaos.link import Fault, Weather

Kind: TypeAlias = Literal["kill", "term", "freeze", "link"]
_KINDS: Sequence[Kind] = ("kill", "term", "freeze", "link", "link", "link")
_STORE_ERRORS = (500.0, 503.0)


@dataclass(frozen=True, slots=True)
class Event:
    """One fault."""

    after: float
    """Seconds from the end of the one before."""
    kind: Kind
    what: str
    """Name of a process, or of a link."""
    seconds: float
    """How long it lasts; a killed process is gone at once, and started again behind them."""
    fault: Fault = field(default_factory=Fault)

    @property
    def label(self) -> str:
        """Kind of fault, for the ledger."""
        if self.kind != "link":
            return f"{self.kind} {'gateway' if self.what.startswith('gateway') else 'engine'}"
        store = self.what.rpartition("-")[2]
        return f"{self.fault.weather} {store if store in ('redis', 's3') else 'engine'}"


def events(seed: int, processes: Sequence[str], links: Sequence[str]) -> Iterator[Event]:
    """Faults without end; the same seed and names make the same ones."""
    rng = random.Random(seed)
    while True:
        kind = rng.choice(_KINDS)
        after, seconds = rng.uniform(0.5, 3.0), rng.uniform(0.5, 5.0)
        if kind != "link":
            yield Event(after, kind, rng.choice(processes), seconds)
            continue
        link = rng.choice(links)
        weathers = [Weather.SLOW, Weather.NARROW, Weather.SILENT, Weather.RESET]
        weathers += [Weather.ANSWERS] if link.endswith("-s3") else []
        weather = rng.choice(weathers)
        amount = {
            Weather.SLOW: rng.uniform(0.02, 0.5),
            Weather.NARROW: rng.choice((2_000.0, 20_000.0, 200_000.0)),
            Weather.ANSWERS: rng.choice(_STORE_ERRORS),
        }.get(weather, 0.0)
        yield Event(after, kind, link, seconds, Fault(weather, amount))
