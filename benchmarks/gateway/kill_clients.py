"""Clients of a Temper whose processes are being killed, and their judgement: benchmarks.gateway.kills starts them.

A stream may be cut, and a request refused with 5xx or not answered because nobody listens. An answer that is called
whole must be the one that was given before the kills, to the byte; what came of a cut one must be its beginning. A job
that was accepted ends once: one record, one last state, one version, and the losses of a job that nobody disturbed.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

ANSWER_SECONDS = 60.0
"""Silence after which a request hangs."""
TIE = 1e-3
"""Two tokens whose log-probabilities differ by less may swap places in another batch: no question for a comparison."""
FAR = 1e-3
"""Two losses of one step that differ by more are not of the same training."""
GIVEN_UP = "its engine died or stopped answering each time"
"""The end of a job that met as many kills as it has attempts."""
_PAUSE = 0.25
"""Seconds before somebody who was refused asks again."""
_TERMINAL = ("succeeded", "failed", "cancelled")
_PROMPTS = (
    "Hello",
    "What is 12 plus 7?",
    "Reverse the word temper.",
    "Extract the name: Ada is 36 years old.",
    "What can you do?",
    "Count from one to ten.",
    "Who are you?",
    "What is 31 minus 14?",
    "Reverse the word anvil.",
    "Say the days of the week.",
)
_LENGTHS = (24, 64, 160)
_EXAMPLES = [
    {"prompt": f"What does code {word} stand for?", "completion": f"Code {word} stands for {meaning}."}
    for word, meaning in (("amber", "slow down"), ("birch", "all clear"), ("coral", "call home"), ("dune", "lock up"))
]


class End(enum.StrEnum):
    """End of a question."""

    WHOLE = "whole"
    CUT = "cut"
    """The stream ended with an error event, or the connection closed in the middle of it."""
    REFUSED = "refused"
    """5xx."""
    UNREACHABLE = "unreachable"
    """Nobody listened, or the connection was closed before an answer."""
    WRONG = "wrong"
    """Another text than before the kills."""
    TRUNCATED = "truncated"
    """A stream that ended as if nothing were missing, without its last event."""
    UNEXPECTED = "unexpected"
    """Another status."""
    HUNG = "hung"


BREACHES = frozenset({End.WRONG, End.TRUNCATED, End.UNEXPECTED, End.HUNG})


@dataclass(frozen=True, slots=True)
class Question:
    """A greedy chat; ``answer`` and ``reason`` are what came of it before the kills."""

    prompt: str
    max_tokens: int
    answer: str = ""
    reason: str = ""

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.prompt}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
        }


async def known_questions(client: httpx.AsyncClient, model: str) -> list[Question]:
    """Questions with their answers, without those whose answer hangs on a tie."""
    asked = [Question(prompt, length) for prompt, length in itertools.product(_PROMPTS, _LENGTHS)]
    known = [question for question in await asyncio.gather(*(_known(client, model, q) for q in asked)) if question]
    if not known:
        raise RuntimeError("every answer of this model hangs on a tie: there is nothing to compare")
    return known


async def _known(client: httpx.AsyncClient, model: str, question: Question) -> Question | None:
    body = question.body(model) | {"logprobs": True, "top_logprobs": 2}
    answer = await client.post("/v1/chat/completions", json=body)
    choice = answer.raise_for_status().json()["choices"][0]
    tops = [[top["logprob"] for top in token["top_logprobs"]] for token in choice["logprobs"]["content"]]
    if any(len(top) > 1 and abs(top[0] - top[1]) < TIE for top in tops):
        return None
    return replace(question, answer=choice["message"]["content"], reason=choice["finish_reason"])


async def ask(client: httpx.AsyncClient, model: str, question: Question) -> tuple[End, str]:
    """Streams an answer and judges it; returns why as well."""
    text, reason, done, begun = "", "", False, False
    ended: End | None = None
    why = ""
    try:
        async with client.stream(
            "POST", "/v1/chat/completions", json=question.body(model) | {"stream": True}
        ) as response:
            if response.status_code != 200:
                told = (await response.aread()).decode(errors="replace")[:300]
                return (
                    End.REFUSED if response.status_code >= 500 else End.UNEXPECTED
                ), f"{response.status_code} {told}"
            begun = True
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        ended, why = End.CUT, str(chunk["error"])
                        continue
                    for choice in chunk["choices"]:
                        text += choice["delta"].get("content") or ""
                        reason = choice["finish_reason"] or reason
    except httpx.ReadTimeout:
        return End.HUNG, f"nothing for {ANSWER_SECONDS:.0f} s after {len(text)} characters"
    except httpx.TransportError as error:
        ended, why = (End.CUT if begun else End.UNREACHABLE), type(error).__name__
    if done:
        if (text, reason) == (question.answer, question.reason):
            return End.WHOLE, ""
        return End.WRONG, f"{question.prompt!r}: {text!r} ({reason}), not {question.answer!r} ({question.reason})"
    if not question.answer.startswith(text):
        return End.WRONG, f"{question.prompt!r}: {text!r} is no beginning of {question.answer!r}"
    return (End.TRUNCATED, f"after {len(text)} characters") if ended is None else (ended, why)


@dataclass(slots=True)
class Streams:
    """Clients that ask one question after the other."""

    client: httpx.AsyncClient
    model: str
    questions: Sequence[Question]
    ends: Counter[End] = field(default_factory=Counter)
    breaches: list[str] = field(default_factory=list)
    whys: Counter[str] = field(default_factory=Counter)
    whole: list[tuple[float, float]] = field(default_factory=list)
    """Times at which each whole answer was asked for and had come."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by each of them."""

    async def run(self, rng: random.Random) -> None:
        """Asks until it is cancelled."""
        while True:
            asked = time.monotonic()
            end, why = await ask(self.client, self.model, rng.choice(self.questions))
            self.ends[end] += 1
            if end is End.WHOLE:
                self.whole.append((asked, time.monotonic()))
                self._news.set()
            else:
                self.whys[f"{end}: {why[:120]}"] += 1
            if end in BREACHES:
                self.breaches.append(f"an answer was {end}: {why}")
            # The jobs need the processor too, and who is refused does not ask again at once.
            await asyncio.sleep(0.05 if end is End.WHOLE else _PAUSE)

    async def first_whole(self, since: float, within: float) -> float | None:
        """Seconds from a moment to the first whole answer that was asked for behind it; None: it took longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(since + within - time.monotonic()):
                while True:
                    self._news.clear()
                    for asked, came in self.whole:
                        if asked >= since:
                            return came - since
                    await self._news.wait()
        return None


@dataclass(slots=True)
class Jobs:
    """A client that keeps a few training jobs unfinished, and knows which were accepted."""

    client: httpx.AsyncClient
    name: str
    """Prefix of the names of adapters and of idempotency keys."""
    epochs: int = 24
    checkpoint_every: int = 5
    accepted: dict[str, str] = field(default_factory=dict)
    """Job id by adapter."""
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The job by adapter."""
    refusals: int = 0
    breaches: list[str] = field(default_factory=list)

    async def run(self, unfinished: int) -> None:
        """Submits, and follows, until it is cancelled."""
        for number in itertools.count():
            while len(self.accepted) - len(self.ended) >= unfinished:
                await self.look()
                await asyncio.sleep(_PAUSE)
            adapter = f"{self.name}-{number}"
            job_id = await self.submit(adapter)
            if job_id is not None:
                self.accepted[adapter] = job_id

    async def submit(self, adapter: str) -> str | None:
        """Sends it under the adapter's own key until it is accepted; None: it was refused for good."""
        body = {
            "adapter": adapter,
            "examples": _EXAMPLES,
            "epochs": self.epochs,
            "learning_rate": 1e-3,
            "checkpoint_every": self.checkpoint_every,
            "attach": False,
        }
        while True:
            response = await self._tried("POST", "/v1/train/sft", json=body, headers={"idempotency-key": adapter})
            if response.status_code == 202:
                return str(response.json()["id"])
            self.breaches.append(f"the job {adapter} was refused: {response.status_code} {response.text[:300]}")
            return None

    async def look(self) -> None:
        """Asks once for every job that has not ended."""
        for adapter, job_id in self.accepted.items():
            if adapter in self.ended:
                continue
            response = await self._tried("GET", f"/v1/train/jobs/{job_id}")
            if response.status_code != 200:
                self.breaches.append(f"the accepted job {job_id} is lost: {response.status_code} {response.text[:300]}")
                self.ended[adapter] = {"id": job_id, "state": "lost"}
            elif response.json()["state"] in _TERMINAL:
                self.ended[adapter] = response.json()

    async def curve(self) -> dict[int, float]:
        """The losses of a job that nobody disturbs."""
        adapter = f"{self.name}-undisturbed"
        job_id = await self.submit(adapter)
        if job_id is None:
            raise RuntimeError(self.breaches[-1])
        self.accepted[adapter] = job_id
        while adapter not in self.ended:
            await self.look()
            await asyncio.sleep(_PAUSE)
        curve = dict(_losses(await self._events(job_id)))
        if sorted(curve) != list(range(1, self.epochs + 1)):
            raise RuntimeError(f"the undisturbed job has not reported every step: {self.ended[adapter]}")
        return curve

    async def settle(self, seconds: float) -> None:
        """Waits until every accepted job has ended."""
        until = time.monotonic() + seconds
        while len(self.ended) < len(self.accepted) and time.monotonic() < until:
            await self.look()
            await asyncio.sleep(_PAUSE)
        for adapter in self.accepted.keys() - self.ended.keys():
            self.breaches.append(f"the accepted job {self.accepted[adapter]} did not end in {seconds:.0f} s")

    async def audit(self, curve: Mapping[int, float]) -> None:
        """Looks at every job once more, when nothing is killed any more."""
        listed: Counter[str] = Counter()
        after: dict[str, str] = {}
        while page := (await self._tried("GET", "/v1/train/jobs", params={"limit": "1000", **after})).json()["data"]:
            listed.update(job["adapter"] for job in page)
            after = {"after": page[-1]["id"]}
        for adapter, job_id in self.accepted.items():
            if listed[adapter] != 1:
                self.breaches.append(
                    f"there are {listed[adapter]} jobs of {adapter}, which was submitted under one key"
                )
            if (again := await self.submit(adapter)) != job_id:
                self.breaches.append(f"the key of {job_id} makes another job when it is used again: {again}")
            if (job := self.ended.get(adapter)) is not None and job["state"] != "lost":
                self.breaches += await self._judge(adapter, job, curve)

    async def _judge(self, adapter: str, job: Mapping[str, Any], curve: Mapping[int, float]) -> list[str]:
        found = await self._tried("GET", f"/v1/adapters/{adapter}/versions")
        versions = [f"{adapter}@{v['version']}" for v in found.json()["data"]] if found.status_code == 200 else []
        events = await self._events(job["id"])
        ends = [event["data"]["state"] for event in events if event["kind"] == "state"]
        ends = [state for state in ends if state in _TERMINAL]
        losses = _losses(events)
        wrong = []
        if ends != [job["state"]] or events[-1]["data"].get("state") != job["state"]:
            wrong.append(f"ended as {ends}, its record says {job['state']}")
        if job["state"] == "succeeded":
            if versions != [job["result_adapter"]]:
                wrong.append(f"has the versions {versions}, its record says {job['result_adapter']}")
            if not losses or losses[-1][0] != max(curve):
                wrong.append(f"succeeded, but its last report is {losses[-1:]}")
        elif not (job["state"] == "failed" and GIVEN_UP in (job["reason"] or "")):
            wrong.append(f"{job['state']}: {job['reason']}")
        elif len(versions) > 1:
            wrong.append(f"was given up and has the versions {versions}")
        far = [(step, loss) for step, loss in losses if not math.isclose(loss, curve.get(step, math.nan), abs_tol=FAR)]
        if far:
            wrong.append(f"reports (step, loss) {far[:3]}, not those of an undisturbed job")
        if twice := _twice(events):
            wrong.append(f"reports steps twice in one attempt: {twice[:3]}")
        return [f"the job {job['id']} of {adapter} {what}" for what in wrong]

    async def _events(self, job_id: str) -> list[dict[str, Any]]:
        text = (await self._tried("GET", f"/v1/train/jobs/{job_id}/events")).text
        return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]

    async def _tried(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The answer, however often it takes: 5xx and a lost connection say nothing about the request."""
        while True:
            try:
                response = await self.client.request(method, path, **options)
                if response.status_code < 500:
                    return response
            except httpx.TransportError:
                pass
            self.refusals += 1
            await asyncio.sleep(_PAUSE)


def _losses(events: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(step, loss) of every report."""
    reports = (event["data"] for event in events if event["kind"] == "progress")
    return [(int(data["step"]), float(data["loss"])) for data in reports if "loss" in data]


def _twice(events: Sequence[Mapping[str, Any]]) -> list[int]:
    """Steps that one attempt reported again, or before an earlier one."""
    found, last = [], -1
    for event in events:
        if event["kind"] == "state":
            last = -1
        elif event["kind"] == "progress" and "loss" in event["data"]:
            step = int(event["data"]["step"])
            if step <= last:
                found.append(step)
            last = step
    return found
