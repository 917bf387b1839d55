"""Conversations: items that are kept together, and that responses read and add to."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

import structlog

from services.common.errors import InvalidRequest, NotFound, TemperError
from services.gateway.api.responses.store.documents import Document, DocumentStore
from services.gateway.api.responses.store.record import CONTINUABLE, Record
from services.gateway.api.responses.store.store import Place
from services.gateway.api.responses.streaming.items import Data, new_id, new_item_id

log = structlog.get_logger(__name__)
_ID = re.compile(r"conv_[0-9a-f]{32}")


def new_conversation(metadata: Mapping[str, str] | None) -> Document:
    """One without items."""
    body = {"id": new_id("conv"), "object": "conversation", "created_at": int(time.time())}
    return Document(body | {"metadata": dict(metadata or {})})


async def find_conversation(documents: DocumentStore, place: Place, *, param: str = "conversation_id") -> Document:
    """Raises NotFound; it names ``param``."""
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
    """Whether one can have such an id."""
    return _ID.fullmatch(place.id) is not None


def check_new(items: Sequence[Data], known: Sequence[Data], *, field: str) -> None:
    """Raises InvalidRequest: an item of ``field`` has the id of another one in the conversation."""
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
    """What one response adds to a conversation.

    Args:
        documents: where conversations are.
        place: of this one.
        given: the input of the response.
    """

    def __init__(self, documents: DocumentStore, place: Place, given: Sequence[Data]) -> None:
        self._documents = documents
        self._place = place
        self._given = given

    async def end(self, record: Record) -> None:
        """Adds input and answer, if there is one, and says in the response's `conversation` whether that was done: the
        answer goes out all the same."""
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
            if item["id"] in known:  # another response was given the same at the same time
                item = {**item, "id": new_item_id(item["id"].partition("_")[0], record.id)}
            conversation.items.append(item)
