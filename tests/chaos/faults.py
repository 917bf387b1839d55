"""Faults of a campaign: a sequence of what breaks, where, and for how long, that a seed makes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tests.chaos.link import Fault, Weather

Kind: TypeAlias = Literal[
    "kill", "term", "twice", "hang up", "freeze", "link", "refuses", "disk", "memory", "clock", "renew", "roll"
]
_WEIGHTS: Mapping[Kind, float] = {
    "kill": 3,
    "term": 2,
    "twice": 0.5,
    "hang up": 0.5,
    "freeze": 2,
    "link": 8,
    "refuses": 2,
    "disk": 2,
    "memory": 2,
    "clock": 2,
    "renew": 1,
    "roll": 0.5,
}
STORES = ("redis", "s3")
CERTIFICATES = "certificates"
GROUPS = ("gateways", "engines")
_STORE_ERRORS = (200.0, 301.0, 403.0, 412.0, 429.0, 500.0, 503.0)
REFUSED = ("BUSY", "MASTERDOWN", "NOPERM", "NOREPLICAS", "OOM", "READONLY")
"""Codes that Redis refuses with: not MISCONF, as a disk that its writes do not fit on is a fault of its own."""
_ROOM = (0.0, 4096.0, 262_144.0)
"""Bytes: files that are longer do not grow."""
_HEADROOM = (4 * 2.0**20, 32 * 2.0**20, 128 * 2.0**20)
"""Bytes that a process may still map."""
_JUMPS = (-86_400.0, -3_600.0, -60.0, -2.0, 2.0, 60.0, 3_600.0, 86_400.0)
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Event:
    """One fault."""

    after: float
    """Seconds from the end of the one before."""
    kind: Kind
    what: str
    """Name of a process, a store, a link, or a group of processes."""
    seconds: float
    """How long it lasts; a killed process is gone at once, and started again behind them."""
    fault: Fault = field(default_factory=Fault)
    amount: float = 0.0
    """Of disk and memory bytes that are left, of a clock seconds."""
    code: str = ""
    """What Redis refuses with."""

    @property
    def label(self) -> str:
        """Kind of fault, for the ledger."""
        kind = self.code or (self.kind if self.kind != "link" else str(self.fault.weather))
        return f"{kind} {self._where()}"

    def _where(self) -> str:
        if self.kind == "link":
            store = self.what.rpartition("-")[2]
            return f"link to {store if store in STORES else 'engine'}"
        if self.what in (*STORES, *GROUPS, CERTIFICATES):
            return self.what
        return "gateway" if self.what.startswith("gateway") else "engine"

    def __str__(self) -> str:
        how = f" {self.fault.amount:g}" if self.fault.amount else f" {self.amount:g}" if self.amount else ""
        return f"{self.label} ({self.what}){how} {self.seconds:.1f} s"


def events(seed: int, processes: Sequence[str], links: Sequence[str]) -> Iterator[Event]:
    """Faults without end; the same seed and names make the same ones."""
    rng = random.Random(seed)
    while True:
        (kind,) = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        after, seconds = rng.uniform(0.5, 3.0), rng.uniform(0.5, 5.0)
        match kind:
            case "link":
                link = rng.choice(links)
                yield Event(after, kind, link, seconds, _weather(rng, link))
            case "roll":
                yield Event(after, kind, rng.choice(GROUPS), seconds)
            case "renew":
                yield Event(after, kind, CERTIFICATES, seconds)
            case "kill" | "freeze":
                # A store is one of several parts, and everything hangs on it.
                yield Event(after, kind, rng.choice([*processes, *STORES]), seconds)
            case "refuses":
                yield Event(after, kind, "redis", seconds, code=rng.choice(REFUSED))
            case "term" | "twice" | "hang up":
                yield Event(after, kind, rng.choice(processes), seconds)
            case "disk":
                yield Event(after, kind, rng.choice([*processes, "redis"]), seconds, amount=rng.choice(_ROOM))
            case "memory":
                yield Event(after, kind, rng.choice(processes), seconds, amount=rng.choice(_HEADROOM))
            case "clock":
                yield Event(after, kind, rng.choice(processes), seconds, amount=rng.choice(_JUMPS))


def _weather(rng: random.Random, link: str) -> Fault:
    weathers = [Weather.SLOW, Weather.NARROW, Weather.SILENT, Weather.RESET]
    weathers += [Weather.ANSWERS, Weather.DAMAGED] if link.endswith("-s3") else []
    weather = rng.choice(weathers)
    amount = {
        Weather.SLOW: rng.uniform(0.02, 0.5),
        Weather.NARROW: rng.choice((2_000.0, 20_000.0, 200_000.0)),
        Weather.ANSWERS: rng.choice(_STORE_ERRORS),
        Weather.DAMAGED: rng.choice((1.0, 2.0, 5.0)),
    }.get(weather, 0.0)
    return Fault(weather, amount)
