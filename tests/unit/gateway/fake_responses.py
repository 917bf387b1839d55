"""ResponseStore's and DocumentStore's methods over dictionaries. What Redis does in their place:
tests/integration/test_response_store.py and test_stored_documents.py."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from services.common.errors import InvalidRequest, NotFound, PayloadTooLarge, Unavailable
from services.gateway.api.responses.documents import Document, DocumentStore
from services.gateway.api.responses.response_object import ACTIVE, Record, missing
from services.gateway.api.responses.store import Place


class MemoryResponses:
    """Keeps responses as JSON, as Redis does."""

    def __init__(self) -> None:
        self.records: dict[str, str] = {}
        self.largest = 2**20
        self.down = False
        self.calls = 0

    def largest_of(self, owner: str) -> int:
        return self.largest

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


class MemoryDocuments(DocumentStore):
    """Keeps documents as JSON, as Redis does; away when the responses are."""

    def __init__(self, responses: MemoryResponses) -> None:
        self._responses = responses
        self.kept: dict[str, str] = {}

    async def save(self, place: Place, document: Document, *, replaces: bool = False) -> bool:
        self._responses._check()
        if replaces and (place.key not in self.kept or json.loads(self.kept[place.key])[3] != document.revision):
            return False
        document.revision = secrets.token_hex(8)
        text = json.dumps([document.body, document.items, document.tags, document.revision])
        if len(text) > self._responses.largest_of(place.owner):
            raise PayloadTooLarge("too large to be kept")
        self.kept[place.key] = text
        return True

    async def find(self, place: Place) -> Document | None:
        self._responses._check()
        return Document(*json.loads(self.kept[place.key])) if place.key in self.kept else None

    async def delete(self, place: Place) -> bool:
        self._responses._check()
        return self.kept.pop(place.key, None) is not None

    async def chats(
        self,
        owner: str,
        wanted: Callable[[dict[str, Any]], bool],
        *,
        limit: int,
        after: str | None = None,
        newest_first: bool = False,
    ) -> tuple[list[dict[str, Any]], bool]:
        self._responses._check()
        prefix = Place(owner, "chatcmpl-").key
        found = [Document(*json.loads(text)) for key, text in self.kept.items() if key.startswith(prefix)]
        found = found[::-1] if newest_first else found
        if after is not None:
            ids = [document.id for document in found]
            if after not in ids:
                raise NotFound("no such stored completion", param="after")
            found = found[ids.index(after) + 1 :]
        bodies = [document.body for document in found if wanted(document.tags)]
        return bodies[:limit], len(bodies) > limit
