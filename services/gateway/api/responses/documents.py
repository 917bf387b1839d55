"""Stored chats and conversations: documents beside the responses, in the same store.

A conversation has items that are kept together, and that responses read and add to."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import structlog
from pydantic_core import from_json, to_json

from services.common.errors import Conflict, InvalidRequest, NotFound, PayloadTooLarge, TemperError
from services.common.storage.record_versions import RESPONSE
from services.common.storage.redis import call_async
from services.gateway.api.responses.response_object import CONTINUABLE, Data, Record, new_id, new_item_id
from services.gateway.api.responses.store import Place, ResponseStore

_ATTEMPTS = 16
"""Attempts to change what others change at the same time."""
_LOOKED_AT = 100
_PAGE_BYTES = 8 * 2**20
"""Largest size of a page of a list. Where documents are large, a page has fewer of them than were asked for."""


@dataclass(slots=True)
class Document:
    """A stored chat, or a conversation."""

    body: Data
    """Body as GET answers it."""
    items: list[Data] = field(default_factory=list)
    """Items of the document: the messages of a chat's request, or the items of a conversation."""
    tags: Data = field(default_factory=dict)
    """Tags that a list is filtered by, without reading the rest."""
    revision: str = ""

    @property
    def id(self) -> str:
        return str(self.body["id"])


class DocumentStore:
    """Store of documents. For one asyncio loop; every method may raise Unavailable.

    Args:
        store: of the responses; its limits hold for responses and documents together.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def save(self, place: Place, document: Document, *, replaces: bool = False) -> bool:
        """Keeps a document, and gives it a new revision.

        Args:
            replaces: write only over the revision that the document has.

        Returns:
            True if it was written.

        Raises:
            PayloadTooLarge: it is over the limit.
        """
        *texts, tags = (to_json(part, inf_nan_mode="null") for part in (document.body, document.items, document.tags))
        size, largest = sum(map(len, texts)) + len(tags), self._store.largest_of(place.owner)
        if size > largest:
            raise PayloadTooLarge(f"it would have {size} bytes, and {largest} can be kept")
        revision = secrets.token_hex(8)
        expected = document.revision if replaces else ""
        written = await self._store.put(place, "completed", texts, revision=revision, tags=tags, replaces=expected)
        if written:
            document.revision = revision
        return written

    async def find(self, place: Place) -> Document | None:
        """Stored document; None: it is not kept."""
        names = ["body", "items", "tags", "revision", "schema"]
        body, items, tags, revision, schema = await call_async(
            lambda: cast(Awaitable[list[str | None]], self._store.redis.hmget(place.key, names))
        )
        if body is None:
            return None
        RESPONSE.check(schema, place.id)
        return Document(from_json(body), from_json(items or "[]"), from_json(tags or "{}"), revision or "")

    async def change(self, place: Place, edit: Callable[[Document], None]) -> Document | None:
        """Changes a document atomically.

        Args:
            edit: changes the document; called again if somebody else has changed it meanwhile.

        Returns:
            Document as it is now; None: it is not kept.

        Raises:
            PayloadTooLarge: it would be over the limit.
            Conflict: others kept changing it at the same time.
        """
        for _ in range(_ATTEMPTS):
            found = await self.find(place)
            if found is None:
                return None
            edit(found)
            if await self.save(place, found, replaces=True):
                return found
        raise Conflict(f"{place.id} is being changed by others: try again")

    async def delete(self, place: Place) -> bool:
        """Deletes a document; True if there was one."""
        return await self._store.drop(place)

    async def chats(
        self,
        owner: str,
        wanted: Callable[[Data], bool],
        *,
        limit: int,
        after: str | None = None,
        newest_first: bool = False,
    ) -> tuple[list[Data], bool]:
        """Stored chats by the time at which they were made, and whether there are more.

        Args:
            wanted: whether a chat with these tags is in the list.
            after: id of the chat behind which the page begins.

        Raises:
            NotFound: there is no ``after``.
        """
        index = Place(owner, "").chats
        start = 0
        if after is not None:
            rank_of = self._store.redis.zrevrank if newest_first else self._store.redis.zrank
            rank = await call_async(lambda: cast(Awaitable[int | None], rank_of(index, after)))
            if rank is None:
                raise NotFound(f"no such stored completion: {after[:80]!r}", param="after")
            start = rank + 1
        page: list[Data] = []
        size = 0
        while True:
            places = [Place(owner, name) for name in await self._range(index, start, newest_first)]
            if not places:
                return page, False
            start += len(places)
            for place, tags in zip(places, await self._tags(places), strict=True):
                if tags is None or not wanted(from_json(tags)):
                    continue  # the former has expired
                if len(page) == limit or size >= _PAGE_BYTES:
                    return page, True
                body = await self._body(place)
                if body is not None:
                    page.append(from_json(body))
                    size += len(body)

    async def _range(self, index: str, start: int, newest_first: bool) -> list[str]:
        reply: Any = await call_async(
            lambda: self._store.redis.zrange(index, start, start + _LOOKED_AT - 1, desc=newest_first)
        )
        return [str(name) for name in reply]

    async def _tags(self, places: Sequence[Place]) -> list[str | None]:
        async def read() -> Any:
            async with self._store.redis.pipeline(transaction=False) as pipe:
                for place in places:
                    pipe.hget(place.key, "tags")
                return await pipe.execute()

        return cast(list[str | None], await call_async(read))

    async def _body(self, place: Place) -> str | None:
        """Body as it is kept. Raises NewerSchema."""
        body, schema = await call_async(
            lambda: cast(Awaitable[list[str | None]], self._store.redis.hmget(place.key, ["body", "schema"]))
        )
        RESPONSE.check(schema, place.id)
        return body


log = structlog.get_logger(__name__)
_ID = re.compile(r"conv_[0-9a-f]{32}")


def new_conversation(metadata: Mapping[str, str] | None) -> Document:
    """New conversation, without items."""
    body = {"id": new_id("conv"), "object": "conversation", "created_at": int(time.time())}
    return Document(body | {"metadata": dict(metadata or {})})


async def find_conversation(documents: DocumentStore, place: Place, *, param: str = "conversation_id") -> Document:
    """Stored conversation. Raises NotFound, which names ``param``."""
    found = await documents.find(place) if _ID.fullmatch(place.id) else None
    if found is None:
        raise missing(place, param=param)
    return found


def missing(place: Place, *, param: str = "conversation_id") -> NotFound:
    """The error of a conversation that is not kept."""
    return NotFound(
        f"no such conversation: {place.id[:80]!r}; they are kept for a while only after their last change", param=param
    )


def is_conversation(place: Place) -> bool:
    """True if a conversation can have such an id."""
    return _ID.fullmatch(place.id) is not None


def check_new(items: Sequence[Data], known: Sequence[Data], *, field: str) -> None:
    """Checks the ids of new items. Raises InvalidRequest: an item of ``field`` has the id of another one in the
    conversation."""
    ids = {item["id"] for item in known}
    for index, item in enumerate(items):
        if item["id"] in ids:
            param = f"{field}[{index}].id"
            raise InvalidRequest(
                f"{param}: the conversation has an item {item['id'][:80]!r} already: leave the item out, or its id",
                param=param,
            )
        ids.add(item["id"])


class Turn:
    """Turn of a conversation: the input and the answer of one response.

    Args:
        documents: store of conversations.
        place: of the conversation.
        given: the input of the response.
    """

    def __init__(self, documents: DocumentStore, place: Place, given: Sequence[Data]) -> None:
        self._documents = documents
        self._place = place
        self._given = given

    async def end(self, record: Record) -> None:
        """Adds input and answer to the conversation, if there is an answer. If they cannot be added, the response's
        `conversation` becomes null and the answer goes out all the same."""
        response = record.response
        if record.status not in CONTINUABLE:
            return
        try:
            changed = await self._documents.change(self._place, lambda found: self._add(found, record))
        except TemperError as error:
            log.warning("a response is not added to its conversation", response=record.id, error=error.message)
            changed = None
        if changed is None:
            response["conversation"] = None

    def _add(self, conversation: Document, record: Record) -> None:
        known = {item["id"] for item in conversation.items}
        for item in (*self._given, *record.said):
            if item["id"] in known:  # another response was given the same item at the same time
                item = {**item, "id": new_item_id(item["id"].partition("_")[0], record.id)}
            conversation.items.append(item)


def page_of(
    items: Sequence[Data], *, after: str | None, limit: int, order: Literal["asc", "desc"], missing_item: str
) -> tuple[list[Data], bool]:
    """Page of stored items, and whether more follow it.

    Args:
        items: oldest first.
        after: id of the item before the page; None: the page is the first.
        missing_item: beginning of the error, which the id follows: "response resp_1 has no input item".

    Raises:
        NotFound: no item has the id ``after``.
    """
    ordered = items[::-1] if order == "desc" else items
    start = 0
    if after is not None:
        start = next((index + 1 for index, item in enumerate(ordered) if item["id"] == after), 0)
        if start == 0:
            raise NotFound(f"{missing_item} {after[:80]!r}", param="after")
    return list(ordered[start : start + limit]), start + limit < len(ordered)
