"""Jobs: training jobs of every kind that end once, and jobs that are steered, whose histories are checked."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from benchmarks.gateway.kill_clients import GIVEN_UP
from tests.chaos.histories.models import ABSENT, ENDS, Queue
from tests.chaos.histories.recorder import Recorder, Wrong
from tests.chaos.traffic.part import PAUSE, Part

_EXAMPLES = [
    {"prompt": f"What does code {word} stand for?", "completion": f"Code {word} stands for {meaning}."}
    for word, meaning in (("amber", "slow down"), ("birch", "all clear"))
]
_SUMS = [{"prompt": "What is 12 plus 7?", "answer": "19"}, {"prompt": "What is 3 plus 4?", "answer": "7"}]
_PAIRS = [{"prompt": "What is 12 plus 7?", "chosen": "19", "rejected": "20"}]
_RATED = [
    {"prompt": "What is 12 plus 7?", "completion": "19", "label": True},
    {"prompt": "What is 12 plus 7?", "completion": "20", "label": False},
]
_GROUP = {"prompt": "What is 3 plus 4?", "completions": [{"text": "7", "reward": 1.0}, {"text": "8", "reward": 0.0}]}
SUITE = "chaos-sums"


def sft(adapter: str, epochs: int, rate: float = 1e-3) -> dict[str, Any]:
    """Body of a job that makes a version of an adapter."""
    return {
        "adapter": adapter,
        "examples": _EXAMPLES,
        "epochs": epochs,
        "learning_rate": rate,
        "checkpoint_every": 5,
        "attach": False,
    }


def _bodies(adapter: str, sources: Sequence[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and body by kind; those of evaluations name no adapter, and make no version."""
    own = {"adapter": adapter, "attach": False}
    generate = {"prompts": _SUMS, "rounds": 3, "completions": 2, "max_tokens": 8, "reward": {"type": "numeric"}}
    return {
        "sft": ("/v1/train/sft", sft(adapter, 8)),
        "dpo": ("/v1/train/dpo", own | {"examples": _PAIRS, "epochs": 6}),
        "kto": ("/v1/train/kto", own | {"examples": _RATED, "epochs": 6}),
        "grpo": ("/v1/train/grpo", own | {"groups": [_GROUP], "epochs": 6}),
        "grpo generate": ("/v1/train/grpo", own | {"generate": generate}),
        "opd": (
            "/v1/train/opd",
            own | {"teacher": sources[0], "prompts": [{"prompt": "What is 12 plus 7?"}], "rounds": 3, "max_tokens": 8},
        ),
        "merge": (
            f"/v1/adapters/{adapter}/merge",
            {"sources": [{"adapter": source} for source in sources], "method": "svd", "rank": 4},
        ),
        "eval": ("/v1/evaluations", {"suites": [SUITE], "targets": ["base", *sources[:1]]}),
    }


class Kinds(Part):
    """A client that keeps one job unfinished, of each kind in turn.

    Args:
        sources: versions that are merged and evaluated.
    """

    name = "jobs"
    pause = 0.5

    def __init__(self, clients: Sequence[httpx.AsyncClient], seed: str, sources: Sequence[str]) -> None:
        super().__init__(clients, seed)
        self._sources = sources
        self._numbers = itertools.count()
        self._running: dict[str, tuple[str, str]] = {}
        """(kind, adapter) by job that has not ended."""

    async def turn(self, rng: random.Random) -> None:
        if self._running:
            for job in list(self._running):
                await self._look(rng, job)
            return
        number = next(self._numbers)
        adapter = f"chaos-kind-{self.seed}-{number}"
        bodies = _bodies(adapter, self._sources)
        # Every kind in turn, in an order of the seed's: a short campaign has a few of them.
        kind = random.Random(self.seed).sample(list(bodies), k=len(bodies))[number % len(bodies)]
        path, body = bodies[kind]
        headers = {"idempotency-key": adapter}
        response = await self.tried(rng, "POST", path, json=body, headers=headers)
        if response.status_code != 202:
            self.breaches.append(f"a job {kind} was refused: {response.status_code} {response.text[:300]}")
            return
        job = response.json()["id"]
        self._running[job] = kind, adapter
        again = await self.tried(rng, "POST", path, json=body, headers=headers)
        if again.json().get("id") != job:
            self.breaches.append(f"the key of the job {job} makes another: {again.status_code} {again.text[:200]}")

    async def _look(self, rng: random.Random, job: str) -> None:
        kind, adapter = self._running[job]
        response = await self.tried(rng, "GET", f"/v1/train/jobs/{job}")
        told = response.json()
        if response.status_code != 200:
            self.breaches.append(f"the job {job} is lost: {response.status_code} {response.text[:300]}")
        elif told["state"] not in ENDS:
            return
        else:
            self.counts[f"{kind} {told['state']}"] += 1
            await self._judge(rng, kind, adapter, told)
        del self._running[job]

    async def _judge(self, rng: random.Random, kind: str, adapter: str, job: Mapping[str, Any]) -> None:
        """It ended once, with exactly the version that its record names."""
        events = (await self.tried(rng, "GET", f"/v1/train/jobs/{job['id']}/events")).text
        ends = sum(f'"state":"{end}"' in line.replace(" ", "") for line in events.splitlines() for end in ENDS)
        if ends != 1:
            self.breaches.append(f"the job {job['id']} ({kind}) ended {ends} times")
        if job["state"] != "succeeded" and GIVEN_UP not in (job["reason"] or ""):
            self.breaches.append(f"the job {job['id']} ({kind}) {job['state']}: {job['reason']}")
        if kind == "eval":
            return
        found = await self.tried(rng, "GET", f"/v1/adapters/{adapter}/versions")
        versions = [v["id"] for v in found.json()["data"]] if found.status_code == 200 else []
        expected = [job["result_adapter"]] if job["state"] == "succeeded" else versions[:1]
        if versions != expected:
            self.breaches.append(f"the job {job['id']} ({kind}) has the versions {versions}, not {expected}")

    async def finish(self) -> None:
        """Every job ends."""
        rng = random.Random(self.seed)
        while self._running:
            for job in list(self._running):
                await self._look(rng, job)
            await asyncio.sleep(PAUSE)
        await super().finish()


_CONFLICTS = (("ended", " has ended: nothing to "), ("late", " is publishing its "), ("late", " is being cancelled: "))


class Steering(Part):
    """Clients that submit a job, look at it, pause, resume and cancel it, by either gateway."""

    name = "steered jobs"
    pause = 0.2

    def __init__(self, clients: Sequence[httpx.AsyncClient], seed: str) -> None:
        super().__init__(clients, seed)
        self._jobs = Recorder("job", Queue())
        self.recorders.append(self._jobs)
        self._numbers = itertools.count()
        self._ids: dict[str, str] = {}
        """Job by adapter, of those that have not ended."""

    async def turn(self, rng: random.Random) -> None:
        if not self._ids:
            await self._submit(rng, f"chaos-steered-{self.seed}-{next(self._numbers)}")
        for adapter in list(self._ids):
            what = rng.choices(("look", "pause", "resume", "cancel", "submit"), (6, 1, 1.5, 0.3, 0.5))[0]
            await self._steer(rng, adapter, what)

    async def _submit(self, rng: random.Random, adapter: str) -> None:
        """Sends it until it is accepted."""
        while adapter not in self._ids:
            job = await self._sent(rng, adapter)
            if job is not None:
                self._ids[adapter] = job
                self.counts["submitted"] += 1
            else:
                await asyncio.sleep(PAUSE)

    async def _sent(self, rng: random.Random, adapter: str) -> str | None:
        def accepted(response: httpx.Response) -> Any:
            if response.status_code == 202:
                return response.json()["id"]
            raise Wrong("not accepted")

        job: str | None = await self._jobs.send(
            rng.choice(self.clients),
            adapter,
            "submit",
            None,
            "POST",
            "/v1/train/sft",
            accepted,
            json=sft(adapter, 6),
            headers={"idempotency-key": adapter},
        )
        return job

    async def _steer(self, rng: random.Random, adapter: str, what: str) -> None:
        if what == "submit":
            await self._sent(rng, adapter)
            return
        path = f"/v1/train/jobs/{self._ids[adapter]}"
        method, path = ("GET", path) if what == "look" else ("POST", f"{path}/{what}")
        state = await self._jobs.send(rng.choice(self.clients), adapter, what, None, method, path, _state)
        if state in ENDS:
            self.counts[state] += 1
            del self._ids[adapter]

    async def finish(self) -> None:
        """Every job is resumed, and ends."""
        rng = random.Random(self.seed)
        while self._ids:
            for adapter in list(self._ids):
                await self._steer(rng, adapter, rng.choice(("resume", "look", "look")))
            await asyncio.sleep(PAUSE)
        await super().finish()


def _state(response: httpx.Response) -> Any:
    if response.status_code == 200:
        return response.json()["state"]
    if response.status_code == 404:
        return ABSENT
    if response.status_code == 409:
        for result, words in _CONFLICTS:
            if words in response.text:
                return result
        raise Wrong("a conflict that no operation has")
    raise Wrong("no state")
