"""Users of a Temper whose processes are killed: each asks once, and says of the answer what it thinks until that is
acknowledged. Half of them send an Idempotency-Key along."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.gateway.loop_kills.fleet import PAUSE, Client

_ANSWER_TOKENS = 4
_TOLD = 200


@dataclass(frozen=True, slots=True)
class Opinion:
    """Feedback that was acknowledged."""

    id: str
    body: dict[str, Any]


@dataclass(slots=True)
class Users:
    """Everybody who asks. A candidate pleases them or not by its number."""

    client: Client
    model: str
    seed: int
    opinions: list[Opinion] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    """Whole answers and others, by what came of them."""
    answered: set[tuple[str, str]] = field(default_factory=set)
    """Versions ("" for the base model) with the arm ("" outside of canaries) that whole answers named."""
    breaches: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self, stop: asyncio.Event, pause: Callable[[], float]) -> None:
        """Users come one after another, after a pause of seconds; the last one is heard out."""
        while not stop.is_set():
            number = next(self._numbers)
            if not await self._visit(number, random.Random(f"user {self.seed} {number}")):
                await asyncio.sleep(PAUSE)
            await asyncio.sleep(pause())

    async def _visit(self, number: int, rng: random.Random) -> bool:
        user = f"u-{self.seed}-{number}"
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"What is {number} plus {rng.randrange(10)}?"}],
            "max_tokens": _ANSWER_TOKENS,
            "user": user,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        try:
            answer = await self.client.http.post(self.client.next_url() + "/v1/chat/completions", json=body)
        except httpx.TransportError as error:
            self.answers[type(error).__name__] += 1
            return False
        if answer.status_code != httpx.codes.OK:
            self.answers[str(answer.status_code)] += 1
            if answer.status_code < 500:
                self._breach(f"a question was refused: {answer.status_code} {answer.text[:_TOLD]}")
            return False
        self.answers["whole"] += 1
        version = answer.headers.get("x-temper-adapter", "")
        arm = answer.headers.get("x-temper-canary", "").rpartition("arm=")[2]
        self.answered.add((version, arm))
        score = rng.uniform(-0.2, 0.2) + (0.8 if arm == "candidate" and pleases(version) else -0.5)
        said: dict[str, Any] = {"completion_id": answer.json()["id"], "user": user, "score": round(score, 3)}
        if rng.random() < 0.5:
            said["correction"] = str(number)
        await self._say(said, {"idempotency-key": user} if number % 2 else {})
        return True

    async def _say(self, said: dict[str, Any], headers: dict[str, str]) -> None:
        answer = await self.client.sure("POST", "/v1/feedback", json=said, headers=headers)
        if answer.status_code in (httpx.codes.OK, httpx.codes.CREATED):
            self.opinions.append(Opinion(answer.json()["id"], said))
        else:
            self._breach(f"an opinion was refused: {answer.status_code} {answer.text[:_TOLD]}")

    def _breach(self, what: str) -> None:
        if len(self.breaches) < _TOLD:
            self.breaches.append(what)


def pleases(version: str) -> bool:
    """True if users like a version ("name@n") better than the one before: two of three."""
    return int(version.rpartition("@")[2] or 0) % 3 != 0
