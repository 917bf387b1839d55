"""Streams and conversations: answers of every shape, held to what the version they name says undisturbed."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import httpx

from tests.chaos.histories.checker import LOST
from tests.chaos.histories.models import ABSENT, Forgetful
from tests.chaos.histories.recorder import Recorder, Wrong
from tests.chaos.traffic.answers import Question, Told, any_model, ask, of_shapes
from tests.chaos.traffic.part import PAUSE, Part


class Streams(Part):
    """Clients that ask one question after the other."""

    name = "streams"
    pause = 0.05

    def __init__(
        self, clients: Sequence[httpx.AsyncClient], seed: str, models: Sequence[str], questions: Sequence[Question]
    ) -> None:
        super().__init__(clients, seed)
        self._models = models
        self._questions = questions
        self._whole: list[tuple[float, httpx.AsyncClient]] = []
        """When each whole answer was asked for, and whom."""
        self._news = asyncio.Event()

    async def run(self, number: int) -> None:
        """See Part. A client keeps to one gateway, so that each is seen to answer."""
        rng = random.Random(f"{self.name} {self.seed} {number}")
        client = self.clients[number % len(self.clients)]
        while True:
            asked = time.monotonic()
            told = await self.ask(client, any_model(rng, self._models), rng.choice(self._questions))
            if told.end == "whole":
                self._whole.append((asked, client))
                self._news.set()
            # The jobs need the processor too, and who is refused does not ask again at once.
            await asyncio.sleep(self.pace * (self.pause if told.end == "whole" else PAUSE))

    async def turn(self, rng: random.Random) -> None:
        await self.ask(rng.choice(self.clients), any_model(rng, self._models), rng.choice(self._questions))

    async def ask(self, client: httpx.AsyncClient, model: str, question: Question, **more: Any) -> Told:
        """Asks and keeps count."""
        told = await ask(client, model, question, **more)
        self.counts[f"{question.shape} {told.end}"] += 1
        if told.breach or told.why.startswith("500"):
            self.breaches.append(f"an answer was {told.end}: {told.why}")
        return told

    async def first_whole(self, client: httpx.AsyncClient, since: float, within: float) -> float | None:
        """Seconds from a moment to the first whole answer of a gateway that was asked for behind it; None: it took
        longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(since + within - time.monotonic()):
                while True:
                    self._news.clear()
                    if any(asked >= since and whom is client for asked, whom in self._whole):
                        return time.monotonic() - since
                    await self._news.wait()
        return None


class Conversations(Streams):
    """Clients with sessions: turns by either gateway, looked at and deleted in between."""

    name = "sessions"
    pause = 0.3

    def __init__(
        self, clients: Sequence[httpx.AsyncClient], seed: str, models: Sequence[str], questions: Sequence[Question]
    ) -> None:
        super().__init__(clients, seed, models, of_shapes(questions, "session"))
        self._kept = Recorder("session", Forgetful())
        self.recorders.append(self._kept)
        self._numbers = itertools.count()

    async def run(self, number: int) -> None:
        await Part.run(self, number)

    async def turn(self, rng: random.Random) -> None:
        session = f"chaos-{self.seed}-{next(self._numbers)}"
        model = any_model(rng, self._models)
        for question in self._questions:
            called, answered = time.monotonic(), LOST
            try:
                told = await self.ask(rng.choice(self.clients), model, question, session_id=session)
                if told.end == "whole":
                    answered = time.monotonic()
            finally:  # one that was cut may still be kept when its engine hears of it
                self._kept.note(session, "write", "kept", True, called, answered)
            if rng.random() < 0.5:
                await self._look(rng, session)
            if rng.random() < 0.3:
                await self._kept.send(
                    rng.choice(self.clients),
                    session,
                    "remove",
                    None,
                    "DELETE",
                    f"/v1/sessions/{session}",
                    _removed,
                )
                await self._look(rng, session)

    async def _look(self, rng: random.Random, session: str) -> None:
        client = rng.choice(self.clients)
        await self._kept.send(client, session, "read", None, "GET", f"/v1/sessions/{session}", _seen)


def _removed(response: httpx.Response) -> Any:
    if response.status_code in (200, 404):
        return True
    raise Wrong("neither removed nor absent")


def _seen(response: httpx.Response) -> Any:
    if response.status_code == 404:
        return ABSENT
    if response.status_code == 200:
        return "kept"
    raise Wrong("neither there nor absent")
