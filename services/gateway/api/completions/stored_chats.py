"""/v1/chat/completions/{id}: chat completions that are kept with store=true, for GET, update and DELETE."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import Response

from services.common.errors import NotFound
from services.gateway.api.base.queries import metadata_filter, metadata_pairs
from services.gateway.api.base.routing import Routes
from services.gateway.api.base.serving import json_response
from services.gateway.api.responses.documents import Document, DocumentStore, page_of
from services.gateway.api.responses.response_object import Data
from services.gateway.api.responses.serving import Responses, ResponseServices
from services.gateway.api.responses.store import Place
from services.gateway.auth.caller import principal_of
from services.gateway.auth.route_permissions import INFERENCE, Permission
from services.gateway.protocol.chat_request import AssistantMessage, ChatRequest, Message, ToolMessage
from services.gateway.protocol.chat_response import (
    ChatCompletion,
    ChatList,
    DeletedChat,
    MetadataRequest,
    StoredMessage,
    StoredMessageList,
)

_ID = re.compile(r"chatcmpl-[0-9a-f]{32}")


class ChatKeeper:
    """Keeps the answer to one request.

    Args:
        owner: of the answer.
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
    """Stored completion. Raises NotFound."""
    found = await documents.find(place) if _ID.fullmatch(place.id) else None
    if found is None:
        raise _missing(place)
    return found


async def delete_chat(documents: DocumentStore, place: Place) -> None:
    """Deletes a stored completion. Raises NotFound."""
    if _ID.fullmatch(place.id) is None or not await documents.delete(place):
        raise _missing(place)


async def change_metadata(documents: DocumentStore, place: Place, metadata: Mapping[str, str]) -> Document:
    """Gives a completion other metadata.

    Raises:
        NotFound: it is not kept.
        Conflict: others kept changing it at the same time.
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
    """Message of a request, in the form in which a stored completion shows it."""
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


routes = Routes("completions")
_ROUTE = "/v1/chat/completions"


@routes.get(
    _ROUTE,
    Permission(INFERENCE),
    responses={200: {"model": ChatList}},
    response_class=Response,
    openapi_extra=metadata_filter("completions"),
)
async def list_chat_completions(
    request: Request,
    stores: Responses,
    after: Annotated[str | None, Query(max_length=64, description="Continue behind the completion of this id.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "asc",
    model: Annotated[str | None, Query(max_length=256, description="Only those of this model.")] = None,
) -> Response:
    """Stored completions, oldest first unless order says otherwise. A page of large ones has fewer than limit."""
    pairs = metadata_pairs(request)

    def wanted(tags: Data) -> bool:
        return model in (None, tags["model"]) and pairs.items() <= tags["metadata"].items()

    page, more = await stores.documents.chats(
        principal_of(request).id, wanted, limit=limit, after=after, newest_first=order == "desc"
    )
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": more,
        },
        None,
    )


@routes.get(
    f"{_ROUTE}/{{completion_id}}",
    Permission(INFERENCE),
    responses={200: {"model": ChatCompletion}},
    response_class=Response,
)
async def get_chat_completion(request: Request, completion_id: str, stores: Responses) -> Response:
    """A stored completion, as it was answered."""
    return _shown((await find_chat(stores.documents, _place(request, completion_id))).body)


@routes.post(
    f"{_ROUTE}/{{completion_id}}",
    Permission(INFERENCE),
    responses={200: {"model": ChatCompletion}},
    response_class=Response,
)
async def update_chat_completion(
    request: Request, completion_id: str, body: MetadataRequest, stores: Responses
) -> Response:
    """Gives a stored completion other metadata."""
    place = _place(request, completion_id)
    return _shown((await change_metadata(stores.documents, place, body.metadata or {})).body)


@routes.delete(f"{_ROUTE}/{{completion_id}}", Permission(INFERENCE))
async def delete_chat_completion(request: Request, completion_id: str, stores: Responses) -> DeletedChat:
    """Forgets a stored completion."""
    await delete_chat(stores.documents, _place(request, completion_id))
    return DeletedChat(id=completion_id)


@routes.get(f"{_ROUTE}/{{completion_id}}/messages", Permission(INFERENCE))
async def list_chat_messages(
    request: Request,
    completion_id: str,
    stores: Responses,
    after: Annotated[str | None, Query(max_length=64, description="Continue behind the message of this id.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "asc",
) -> StoredMessageList:
    """The messages that a stored completion was given, oldest first unless order says otherwise."""
    items = (await find_chat(stores.documents, _place(request, completion_id))).items
    missing_item = f"completion {completion_id[:80]} has no message"
    found, more = page_of(items, after=after, limit=limit, order=order, missing_item=missing_item)
    page: list[Any] = [StoredMessage.model_validate(item) for item in found]
    return StoredMessageList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=more,
    )


def _place(request: Request, completion_id: str) -> Place:
    return Place(principal_of(request).id, completion_id)


def _shown(body: Data) -> Response:
    return json_response(body, body["adapter"])
