"""The learner that is watched while processes are killed: its policy, where it stands at each moment, and a person who
has it go on after a cycle that failed."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import redis.asyncio
import redis.exceptions

from benchmarks.gateway.loop_kills.fleet import Client
from services.common.settings import CommonSettings
from services.common.storage.redis import connect_async
from services.learning.canaries.store import ROOT as CANARIES
from services.learning.learners.store import ROOT as LEARNERS

NAME: Final = "loop"
"""Name of the learner, of its adapter and of its data sets."""
OUTCOMES: Final = ("promoted", "rejected", "rolled_back", "superseded", "failed")
_LOOK_SECONDS = 0.03
_SUITE_ITEMS = 24


def policy(suite: str) -> dict[str, Any]:
    """Short cycles: little data, a small suite, and a canary that decides early.

    Args:
        suite: "name@n".
    """
    return {
        "name": NAME,
        "adapter": NAME,
        "method": "sft",
        "settings": {"epochs": 1, "batch_size": 32, "learning_rate": 1e-5, "lora": {"rank": 2}},
        # Everything that is said teaches, so that a row too many or too few is seen.
        "data": {"max_user_share": 1.0, "max_rows": 100_000, "split": {"validation": 0, "held_out": 0}},
        "trigger": {"min_rows": 24},
        "budget": {"jobs": None},
        "gate": {"no_loss": [{"suite": suite, "max_loss": 0.9}]},
        "canary": {"share": 0.5, "gain": 0.5, "max_seconds": 60, "guardrails": {"latency": None, "errors": None}},
        "stop_after": 1000,
    }


async def apply(client: Client) -> None:
    """Makes the suite of the gate, and the learner."""
    items = [{"prompt": f"What is {n} minus {n % 5}?", "expected": str(n - n % 5)} for n in range(_SUITE_ITEMS)]
    lines = "\n".join(json.dumps(item) for item in items)
    suite = {"name": "keeps", "scorer": {"type": "exact"}, "sampling": {"max_tokens": 4}, "jsonl": lines}
    made = (await client.sure("POST", "/v1/eval/suites", json=suite)).raise_for_status().json()
    (await client.sure("POST", "/v1/learners", json=policy(made["id"]))).raise_for_status()


class Watch:
    """Where the learner stands, as Redis has it; while that is away, as it had it last."""

    def __init__(self, settings: CommonSettings) -> None:
        self._redis = connect_async(settings)
        self.state = "collecting"
        """A learner's state; "promoting" while the pointers of its canary are being moved."""
        self.number = 0
        """Number of its cycle."""
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Looks until it is cancelled."""
        try:
            while True:
                try:
                    await self._look()
                except (redis.exceptions.RedisError, OSError):
                    await asyncio.sleep(_LOOK_SECONDS)
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            await self._redis.aclose()

    async def next_change(self, seconds: float) -> None:
        """Waits for another state, so long at most."""
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _look(self) -> None:
        kept: Any = await self._redis.hget(LEARNERS + NAME, "cycle")
        if kept is None:
            return
        cycle = json.loads(kept)
        state = cycle["state"]
        if state == "canary" and cycle["canary"] is not None:
            tried: Any = await self._redis.hget(CANARIES + cycle["canary"], "state")
            state = "promoting" if tried == "promoting" else state
        self.number = cycle["number"]
        if state != self.state:
            self.state = state
            self._changed.set()


class Person:
    """Looks at the learner now and then, and has it go on at once where it would wait."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.asked = 0
        """Cycles asked for after one that failed."""

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            found = await self._client.get(f"/v1/learners/{NAME}")
            if found["state"] == "stopped":
                await self._client.sure("POST", f"/v1/learners/{NAME}/resume")
            elif found["state"] == "collecting" and found["outcome"] == "failed":
                await self._client.sure("POST", f"/v1/learners/{NAME}/run")
                self.asked += 1
                await asyncio.sleep(2)
            await asyncio.sleep(1)


async def events(client: Client) -> list[dict[str, Any]]:
    """All that happened to the learner, oldest first."""
    return (await client.all(f"/v1/learners/{NAME}/events", limit="1000"))[::-1]
