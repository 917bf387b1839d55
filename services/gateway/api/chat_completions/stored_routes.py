"""/v1/chat/completions/{id}: completions that were made with store=true."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import Response

from services.common.errors import InvalidRequest, NotFound
from services.gateway.api.base.routing import Routes
from services.gateway.api.base.serving import json_response
from services.gateway.api.chat_completions.stored import change_metadata, delete_chat, find_chat
from services.gateway.api.responses.dependencies import Responses
from services.gateway.api.responses.store.store import Place
from services.gateway.api.responses.streaming.items import Data
from services.gateway.auth.caller import principal_of
from services.gateway.auth.route_permissions import INFERENCE, Permission
from services.gateway.protocol.chat.response import ChatCompletion
from services.gateway.protocol.chat.stored import (
    ChatList,
    DeletedChat,
    MetadataRequest,
    StoredMessage,
    StoredMessageList,
)

routes = Routes("completions")
_ROUTE = "/v1/chat/completions"
_MOST_PAIRS = 16
_PAIR = re.compile(r"metadata\[(.{1,64})\]", re.DOTALL)
_METADATA = {
    "parameters": [
        {
            "in": "query",
            "name": "metadata",
            "required": False,
            "style": "deepObject",
            "explode": True,
            "schema": {
                "type": "object",
                "propertyNames": {"minLength": 1, "maxLength": 64},
                "additionalProperties": {"type": "string"},
                "maxProperties": _MOST_PAIRS,
            },
            "description": "Only completions whose metadata have these pairs: metadata[key]=value.",
        }
    ]
}


@routes.get(
    _ROUTE,
    Permission(INFERENCE),
    responses={200: {"model": ChatList}},
    response_class=Response,
    openapi_extra=_METADATA,
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
    pairs = _pairs(request)

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


def _pairs(request: Request) -> dict[str, str]:
    """The metadata of the query. Raises InvalidRequest."""
    pairs: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name != "metadata" and not name.startswith("metadata["):
            continue
        named = _PAIR.fullmatch(name)
        if named is None or named[1] in pairs or len(pairs) == _MOST_PAIRS:
            raise InvalidRequest(
                f"metadata must be given as up to {_MOST_PAIRS} pairs, metadata[key]=value, each key once",
                param="metadata",
            )
        pairs[named[1]] = value
    return pairs


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
    items = items[::-1] if order == "desc" else items
    start = 0
    if after is not None:
        start = next((index + 1 for index, item in enumerate(items) if item["id"] == after), -1)
        if start < 0:
            raise NotFound(f"completion {completion_id[:80]} has no message {after[:80]!r}", param="after")
    page: list[Any] = [StoredMessage.model_validate(item) for item in items[start : start + limit]]
    return StoredMessageList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=start + limit < len(items),
    )


def _place(request: Request, completion_id: str) -> Place:
    return Place(principal_of(request).id, completion_id)


def _shown(body: Data) -> Response:
    return json_response(body, body["adapter"])
