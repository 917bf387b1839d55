"""Chat completions that are kept: with store=true, for GET, update and DELETE."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from services.common.errors import NotFound
from services.gateway.api.responses.dependencies import ResponseServices
from services.gateway.api.responses.store.documents import Document, DocumentStore
from services.gateway.api.responses.store.store import Place
from services.gateway.api.responses.streaming.items import Data
from services.gateway.protocol.chat.request import AssistantMessage, ChatRequest, Message, ToolMessage

_ID = re.compile(r"chatcmpl-[0-9a-f]{32}")


class ChatKeeper:
    """Keeps the answer to one request.

    Args:
        owner: whose it is.
        body: the request.
    """

    def __init__(self, stores: ResponseServices, owner: str, body: ChatRequest) -> None:
        self._stores = stores
        self._owner = owner
        self._body = body

    async def keep(self, whole: Data) -> None:
        """Stores a whole answer, and says in its `store` whether that was done: the answer goes out all the same."""
        whole["store"] = True
        metadata = self._body.metadata or {}
        document = Document(
            whole | {"metadata": metadata},
            [_stored(message, f"{whole['id']}-{number}") for number, message in enumerate(self._body.messages)],
            {"model": whole["model"], "metadata": metadata},
        )
        place = Place(self._owner, document.id)
        documents = self._stores.documents
        whole["store"] = await self._stores.best_effort.tried(place, lambda: documents.save(place, document))


async def find_chat(documents: DocumentStore, place: Place) -> Document:
    """Raises NotFound."""
    found = await documents.find(place) if _ID.fullmatch(place.id) else None
    if found is None:
        raise _missing(place)
    return found


async def delete_chat(documents: DocumentStore, place: Place) -> None:
    """Raises NotFound."""
    if _ID.fullmatch(place.id) is None or not await documents.delete(place):
        raise _missing(place)


async def change_metadata(documents: DocumentStore, place: Place, metadata: Mapping[str, str]) -> Document:
    """Gives a completion other metadata.

    Raises:
        NotFound: it is not kept.
        Conflict: others change it all the time.
    """

    def edit(document: Document) -> None:
        document.body["metadata"] = document.tags["metadata"] = dict(metadata)

    changed = await documents.change(place, edit) if _ID.fullmatch(place.id) else None
    if changed is None:
        raise _missing(place)
    return changed


def _missing(place: Place) -> NotFound:
    return NotFound(
        f"no such stored completion: {place.id[:80]!r}; they are kept for a while only, and with store=true only",
        param="completion_id",
    )


def _stored(message: Message, message_id: str) -> Data:
    """A message of a request, as it is told of a stored completion."""
    content = message.content
    parts = None if content is None or isinstance(content, str) else [{"type": "text", "text": p.text} for p in content]
    told: dict[str, Any] = {
        "id": message_id,
        "role": message.role,
        "content": content if parts is None else "".join(part["text"] for part in parts),
        "name": message.name,
        "content_parts": parts,
    }
    if isinstance(message, ToolMessage):
        told["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        told["refusal"] = message.refusal
        told["reasoning_content"] = message.reasoning_content or message.reasoning
        calls = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls or ()]
        told["tool_calls"] = calls or None
    return told
