"""Part: one kind of client of a fleet that breaks."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import httpx

from tests.chaos.histories.recorder import Recorder

PAUSE = 0.25
"""Seconds before somebody who was refused asks again."""


class Part(ABC):
    """Clients of one kind; a campaign runs `turn` again and again, and `finish` once nothing breaks any more.

    Args:
        clients: of each gateway.
        seed: makes what they ask.
    """

    name: ClassVar[str]
    pause: ClassVar[float] = 0.3
    """Seconds between two turns: faults need the processor, too."""

    def __init__(self, clients: Sequence[httpx.AsyncClient], seed: str) -> None:
        self.clients = clients
        self.seed = seed
        self.pace = 1.0
        """Times the pauses between two turns: a campaign on little processor time asks less often."""
        self.counts: Counter[str] = Counter()
        """What happened, for the ledger."""
        self.breaches: list[str] = []
        self.recorders: list[Recorder] = []
        """Histories that are checked at the end."""

    async def run(self, number: int) -> None:
        """Asks until it is cancelled."""
        rng = random.Random(f"{self.name} {self.seed} {number}")
        while True:
            await self.turn(rng)
            await asyncio.sleep(self.pause * self.pace)

    @abstractmethod
    async def turn(self, rng: random.Random) -> None:
        """Asks for one thing."""

    async def finish(self) -> None:
        """Looks at what is left to be looked at, when nothing breaks any more: at histories."""
        for recorder in self.recorders:
            counts, wrong = recorder.judge()
            self.counts.update({f"{recorder.kind}: {name}": count for name, count in counts.items()})
            self.breaches += wrong

    async def tried(self, rng: random.Random, method: str, path: str, **options: Any) -> httpx.Response:
        """The answer, from either gateway, however often it takes: only of requests that may be repeated. 5xx, lost
        connections and a request that still runs under its key say nothing; of a 500 the campaign is told."""
        while True:
            try:
                response = await rng.choice(self.clients).request(method, path, **options)
            except httpx.TransportError:
                self.counts["lost"] += 1
            else:
                if response.status_code == 500:
                    self.breaches.append(f"a 500 to {method} {path}: {response.text[:200]}")
                busy = response.status_code == 409 and "retry-after" in response.headers
                if response.status_code < 500 and not busy:
                    return response
                self.counts[f"refused {response.status_code}"] += 1
            await asyncio.sleep(PAUSE)
