"""Time until both gateways answer as a promotion or a rollback says."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import httpx

from benchmarks.gateway.loop_kills.fleet import Client, Fleet

_ADAPTER: Final = "switched"
_POLL_SECONDS = 0.02
_SETTLED_SECONDS = 2.0
"""Time for which all answers must be the new ones."""
_JOB_SECONDS = 120.0


_Seconds: TypeAlias = tuple[float, float]
"""Time from sending what a person decides, and from its answer, to the last request that is answered otherwise."""


class _Asking:
    """Asks every gateway all the time, for one session, and knows when the last other answer was asked for."""

    def __init__(self, http: httpx.AsyncClient, urls: Sequence[str], model: str, session: str, wanted: str) -> None:
        self._http, self._urls, self._wanted = http, urls, wanted
        asked = [{"role": "user", "content": "Hello"}]
        self._body = {"model": model, "messages": asked, "max_tokens": 1, "session_id": session}
        self.last_other = 0.0

    async def run(self) -> None:
        await asyncio.gather(*map(self._ask, self._urls))

    async def _ask(self, url: str) -> None:
        while True:
            asked = time.monotonic()
            answer = (await self._http.post(url + "/v1/chat/completions", json=self._body)).raise_for_status()
            if answer.headers.get("x-temper-adapter") != self._wanted:
                self.last_other = max(self.last_other, asked)
            await asyncio.sleep(_POLL_SECONDS)


class Switches:
    """Promotions and rollbacks of one adapter with two versions."""

    def __init__(self, fleet: Fleet, client: Client) -> None:
        self._client, self._urls, self._model = client, fleet.urls, fleet.stack.served_model_name
        self._turns = itertools.cycle((0, 1))

    async def prepare(self) -> None:
        """Trains two versions; the first one is attached."""
        for number in (1, 2):
            published = {"attach": True} if number == 1 else {"attach": False, "candidate": True}
            examples = [{"prompt": "Hello", "completion": f"Hello {number}"}]
            job = await self._post(
                "/v1/train/sft", {"adapter": _ADAPTER, "examples": examples, "epochs": 1, **published}
            )
            async with asyncio.timeout(_JOB_SECONDS):
                while (found := await self._client.get(f"/v1/train/jobs/{job['id']}"))["state"] != "succeeded":
                    if found["state"] in ("failed", "cancelled"):
                        raise RuntimeError(f"the job of version {number} has ended: {found['reason']}")
                    await asyncio.sleep(0.1)

    async def promote(self) -> _Seconds:
        """A person's promotion of a candidate."""
        canary, current, _ = await self._begin()
        return await self._time(current, f"{_ADAPTER}@2", f"/v1/canaries/{canary}/decide", {"decision": "promote"})

    async def roll_back_canary(self) -> _Seconds:
        """A person's rollback of a candidate."""
        canary, _, candidate = await self._begin()
        return await self._time(candidate, f"{_ADAPTER}@1", f"/v1/canaries/{canary}/decide", {"decision": "roll_back"})

    async def roll_back_version(self) -> _Seconds:
        """The way back from a version that is current and attached."""
        return await self._time("nobody", f"{_ADAPTER}@1", f"/v1/adapters/{_ADAPTER}/rollback", {"version": 1})

    async def _begin(self) -> tuple[str, str, str]:
        """A canary that both gateways know, with a session of each arm."""
        begun = await self._post("/v1/canaries", {"version": f"{_ADAPTER}@2", "policy": {"share": 0.5}})
        sessions: dict[str, str] = {}
        for number in itertools.count():
            arms = [await self._arm(url, f"s-{number}") for url in self._urls]
            if all(arms):
                sessions[arms[0]] = f"s-{number}"
            if len(sessions) == 2:
                return begun["id"], sessions["current"], sessions["candidate"]
        raise AssertionError

    async def _arm(self, url: str, session: str) -> str:
        asked = [{"role": "user", "content": "Hello"}]
        body = {"model": self._model, "messages": asked, "max_tokens": 1, "session_id": session}
        answer = await self._client.http.post(url + "/v1/chat/completions", json=body)
        return str(answer.raise_for_status().headers.get("x-temper-canary", "").rpartition("arm=")[2])

    async def _time(self, session: str, wanted: str, path: str, body: dict[str, Any]) -> _Seconds:
        asking = _Asking(self._client.http, self._urls, self._model, session, wanted)
        task = asyncio.create_task(asking.run())
        try:
            await asyncio.sleep(0.3)
            url = self._urls[next(self._turns)]
            sent = time.monotonic()
            (await self._client.http.post(url + path, json=body)).raise_for_status()
            acknowledged = time.monotonic()
            while time.monotonic() - max(asking.last_other, acknowledged) < _SETTLED_SECONDS:
                if task.done():
                    await task
                await asyncio.sleep(0.05)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return max(0.0, asking.last_other - sent), max(0.0, asking.last_other - acknowledged)

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return (await self._client.sure("POST", path, json=body)).raise_for_status().json()


def _told(seconds: Sequence[float]) -> dict[str, float]:
    return {"p50_s": round(statistics.median(seconds), 3), "max_s": round(max(seconds), 3)}


async def measured(fleet: Fleet, count: int) -> dict[str, Any]:
    """Seconds of so many promotions, and rollbacks of both kinds."""
    client = Client(fleet.urls)
    keeping = asyncio.create_task(fleet.keep())
    try:
        switches = Switches(fleet, client)
        await switches.prepare()
        found: dict[str, list[_Seconds]] = {"promotion": [], "rollback_of_a_version": [], "rollback_of_a_candidate": []}
        for _ in range(count):
            found["promotion"].append(await switches.promote())
            found["rollback_of_a_version"].append(await switches.roll_back_version())
            found["rollback_of_a_candidate"].append(await switches.roll_back_canary())
    finally:
        keeping.cancel()
        await client.aclose()
    return {"switches": count} | {
        name: {
            "from_sending": _told([sent for sent, _ in seconds]),
            "from_answer": _told([seen for _, seen in seconds]),
        }
        for name, seconds in found.items()
    }
