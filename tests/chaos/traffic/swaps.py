"""Swaps: versions that become current, are attached, detached and published, while others ask for them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from tests.chaos.histories.checker import LOST
from tests.chaos.histories.models import UNTOLD, Pointer, Versions
from tests.chaos.histories.recorder import Recorder, Wrong
from tests.chaos.traffic.part import Part

_MOST_VERSIONS = 4


class Swaps(Part):
    """Clients that move one adapter's pointer, and attach and detach versions of two others.

    Args:
        moved: adapter whose versions 1 and 2 become current in turn; 2 is current now.
        attached: adapters whose version 1 is attached now and then; nothing is attached now.
    """

    name = "swaps"
    pause = 0.7

    def __init__(self, clients: Sequence[httpx.AsyncClient], seed: str, moved: str, attached: Sequence[str]) -> None:
        super().__init__(clients, seed)
        self._moved, self._attached = moved, attached
        self._pointers = Recorder("pointer", Pointer())
        self.recorders.append(self._pointers)
        self._pointers.note(moved, "begin", f"{moved}@2", True, time.monotonic(), time.monotonic())

    async def turn(self, rng: random.Random) -> None:
        client, turn = rng.choice(self.clients), rng.random()
        send = self._pointers.send
        if turn < 0.25:
            number = rng.choice((1, 2))
            path, to = f"/v1/adapters/{self._moved}/rollback", f"{self._moved}@{number}"
            await send(client, self._moved, "move", to, "POST", path, _before, json={"version": number})
        elif turn < 0.5:
            await send(client, self._moved, "read", None, "GET", f"/v1/adapters/{self._moved}", _current)
        elif turn < 0.65:
            name = rng.choice(self._attached)
            path = f"/v1/adapters/{name}/attach"
            await send(client, "attached", "move", f"{name}@1", "POST", path, _done, json={"version": 1})
        elif turn < 0.8:
            name = rng.choice(self._attached)
            await send(client, "attached", "leave", name, "POST", f"/v1/adapters/{name}/detach", _left, json={})
        else:
            await send(client, "attached", "read", None, "GET", "/v1/adapters", _attached)
        self.counts["operations"] += 1

    async def finish(self) -> None:
        """What is attached and current can be read from both gateways."""
        for client in self.clients:
            await self._pointers.send(client, self._moved, "read", None, "GET", f"/v1/adapters/{self._moved}", _current)
            await self._pointers.send(client, "attached", "read", None, "GET", "/v1/adapters", _attached)
        await super().finish()


def _ok(response: httpx.Response) -> Any:
    if response.status_code != 200:
        raise Wrong("not done")
    return response.json()


def _before(response: httpx.Response) -> Any:
    return _ok(response)["before"]


def _current(response: httpx.Response) -> Any:
    return _ok(response)["version"]


def _done(response: httpx.Response) -> Any:
    _ok(response)
    return UNTOLD


def _left(response: httpx.Response) -> Any:
    if response.status_code == 409:
        return False
    _ok(response)
    return True


def _attached(response: httpx.Response) -> Any:
    return _ok(response)["attached"] or ""


class Publications(Part):
    """Clients that upload versions under keys of their own, and list them."""

    name = "publications"
    pause = 2.0

    def __init__(self, clients: Sequence[httpx.AsyncClient], seed: str, files: Mapping[str, bytes]) -> None:
        super().__init__(clients, seed)
        self._files = files
        self._versions = Recorder("registry of", Versions())
        self.recorders.append(self._versions)
        self._numbers = itertools.count()
        self._made = 0

    async def turn(self, rng: random.Random) -> None:
        name = f"chaos-published-{self.seed}-{self._made // _MOST_VERSIONS}"
        if rng.random() < 0.4:
            await self._publish(rng, name)
        elif self._made % _MOST_VERSIONS:
            await self._list(rng.choice(self.clients), name)

    async def _publish(self, rng: random.Random, name: str) -> None:
        """Sends one under its key until it is there: it is published once."""
        key = f"{name}-{next(self._numbers)}"
        called, known = time.monotonic(), False
        try:
            response = await self.tried(
                rng,
                "POST",
                "/v1/adapters",
                data={"name": name},
                files={file: (file, data) for file, data in self._files.items()},
                headers={"idempotency-key": key},
            )
            known = True
        finally:
            if not known:  # the campaign is over
                self._versions.note(name, "publish", key, None, called, LOST)
        if response.status_code != 201:
            self.breaches.append(f"a version of {name} was refused: {response.status_code} {response.text[:300]}")
            return
        self._versions.note(name, "publish", key, int(response.json()["version"]), called, time.monotonic())
        self._made += 1
        self.counts["published"] += 1

    async def _list(self, client: httpx.AsyncClient, name: str) -> None:
        await self._versions.send(client, name, "list", None, "GET", f"/v1/adapters/{name}/versions", _numbers)

    async def finish(self) -> None:
        for name in list(self._versions.histories):
            if any(operation.name == "publish" and not operation.lost for operation in self._versions.histories[name]):
                await self._list(self.clients[0], name)
        await super().finish()


def _numbers(response: httpx.Response) -> Any:
    return tuple(version["version"] for version in _ok(response)["data"])
