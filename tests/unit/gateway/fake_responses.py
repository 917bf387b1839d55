"""ResponseStore's methods over a dictionary. What Redis does in its place: tests/integration/test_response_store.py."""

from __future__ import annotations

import json
from collections.abc import Sequence

from services.common.errors import InvalidRequest, Unavailable
from services.gateway.responses.record import ACTIVE, Record, missing
from services.gateway.responses.store import Place


class MemoryResponses:
    """Keeps responses as JSON, as Redis does."""

    def __init__(self) -> None:
        self.records: dict[str, str] = {}
        self.down = False
        self.calls = 0

    def largest_of(self, owner: str) -> int:
        return 2**20

    def _check(self) -> None:
        self.calls += 1
        if self.down:
            raise Unavailable("Redis is away")

    async def aclose(self) -> None:
        return None

    def status(self, key: str) -> str | None:
        return json.loads(self.records[key])[0]["status"] if key in self.records else None

    async def save(self, place: Place, record: Record, *, only_active: bool = False) -> bool:
        self._check()
        if only_active and self.status(place.key) not in ACTIVE:
            return False
        self.records[place.key] = json.dumps([record.response, record.items])
        return True

    async def load(self, place: Place, *, param: str = "response_id") -> Record:
        self._check()
        if place.key not in self.records:
            raise missing(place.id, param=param)
        return Record(*json.loads(self.records[place.key]))

    def _set(self, place: Place, status: str) -> None:
        response, items = json.loads(self.records[place.key])
        self.records[place.key] = json.dumps([response | {"status": status}, items])

    async def cancel(self, place: Place) -> Record:
        record = await self.load(place)
        if not record.response["background"]:
            raise InvalidRequest("not a background response", param="response_id")
        if record.status in ACTIVE:
            self._set(place, "cancelled")
        return await self.load(place)

    async def delete(self, place: Place) -> None:
        await self.load(place)
        del self.records[place.key]

    async def beat(self, running: Sequence[tuple[Place, str]]) -> list[bool]:
        self._check()
        wanted = []
        for place, status in running:
            wanted.append(self.status(place.key) in ACTIVE)
            if wanted[-1]:
                self._set(place, status)
        return wanted
