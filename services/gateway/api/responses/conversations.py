"""/v1/conversations: items that responses read and add to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import RootModel

from services.common.errors import NotFound, PayloadTooLarge
from services.gateway.api.base.routing import Routes
from services.gateway.api.base.serving import json_response
from services.gateway.api.responses.documents import (
    Document,
    check_new,
    find_conversation,
    is_conversation,
    missing,
    new_conversation,
    page_of,
)
from services.gateway.api.responses.response_object import Data, given_items
from services.gateway.api.responses.serving import Included, Responses, ResponseServices
from services.gateway.api.responses.store import Place, resolved
from services.gateway.auth.caller import principal_of
from services.gateway.auth.route_permissions import INFERENCE, Permission
from services.gateway.protocol.chat_response import MetadataRequest
from services.gateway.protocol.responses.items import InputItem
from services.gateway.protocol.responses.request import (
    ConversationDeleted,
    ConversationItemsOut,
    ConversationOut,
    ConversationRequest,
    ItemsRequest,
)
from services.gateway.protocol.responses.response import InputItemOut

routes = Routes("responses")
_ROUTE = "/v1/conversations"
_ONE = f"{_ROUTE}/{{conversation_id}}"
_ITEMS = f"{_ONE}/items"


class ConversationItem(RootModel[InputItemOut]):
    """An item of a conversation."""


@routes.post(_ROUTE, Permission(INFERENCE))
async def create_conversation(
    request: Request, stores: Responses, body: ConversationRequest | None = None
) -> ConversationOut:
    """Begins a conversation."""
    document = new_conversation(None if body is None else body.metadata)
    place = _place(request, document.id)
    document.items = await _new_items(stores, place, () if body is None else body.items or ())
    check_new(document.items, (), field="items")
    try:
        await stores.documents.save(place, document)
    except PayloadTooLarge as error:
        raise _too_large(error) from error
    return ConversationOut.model_validate(document.body)


@routes.get(_ONE, Permission(INFERENCE))
async def get_conversation(request: Request, conversation_id: str, stores: Responses) -> ConversationOut:
    """A conversation, without its items."""
    found = await find_conversation(stores.documents, _place(request, conversation_id))
    return ConversationOut.model_validate(found.body)


@routes.post(_ONE, Permission(INFERENCE))
async def update_conversation(
    request: Request, conversation_id: str, body: MetadataRequest, stores: Responses
) -> ConversationOut:
    """Gives a conversation other metadata."""

    def edit(document: Document) -> None:
        document.body["metadata"] = dict(body.metadata or {})

    changed = await _change(stores, _place(request, conversation_id), edit)
    return ConversationOut.model_validate(changed.body)


@routes.delete(_ONE, Permission(INFERENCE))
async def delete_conversation(request: Request, conversation_id: str, stores: Responses) -> ConversationDeleted:
    """Forgets a conversation with its items. Responses that belonged to it stay."""
    place = _place(request, conversation_id)
    if not is_conversation(place) or not await stores.documents.delete(place):
        raise missing(place)
    return ConversationDeleted(id=place.id)


@routes.post(_ITEMS, Permission(INFERENCE), responses={200: {"model": ConversationItemsOut}}, response_class=Response)
async def add_items(
    request: Request, conversation_id: str, body: ItemsRequest, stores: Responses, _include: Included = None
) -> Response:
    """Adds items to a conversation; the answer has them with their ids."""
    place = _place(request, conversation_id)
    added = await _new_items(stores, place, body.items)

    def edit(document: Document) -> None:
        check_new(added, document.items, field="items")
        document.items += added

    await _change(stores, place, edit)
    return _page(added, more=False)


@routes.get(_ITEMS, Permission(INFERENCE), responses={200: {"model": ConversationItemsOut}}, response_class=Response)
async def list_items(
    request: Request,
    conversation_id: str,
    stores: Responses,
    after: Annotated[str | None, Query(max_length=256, description="Continue behind the item of this id.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    _include: Included = None,
) -> Response:
    """The items of a conversation, newest first unless order says otherwise."""
    items = (await find_conversation(stores.documents, _place(request, conversation_id))).items
    missing_item = f"conversation {conversation_id[:80]} has no item"
    page, more = page_of(items, after=after, limit=limit, order=order, missing_item=missing_item)
    return _page(page, more=more)


@routes.get(
    f"{_ITEMS}/{{item_id}}",
    Permission(INFERENCE),
    responses={200: {"model": ConversationItem}},
    response_class=Response,
)
async def get_item(
    request: Request, conversation_id: str, item_id: str, stores: Responses, _include: Included = None
) -> Response:
    """One item."""
    items = (await find_conversation(stores.documents, _place(request, conversation_id))).items
    return json_response(items[_position(items, conversation_id, item_id)], None)


@routes.delete(f"{_ITEMS}/{{item_id}}", Permission(INFERENCE))
async def delete_item(request: Request, conversation_id: str, item_id: str, stores: Responses) -> ConversationOut:
    """Takes an item out of a conversation. The call that an answer belongs to must stay as long as the answer does."""

    def edit(document: Document) -> None:
        del document.items[_position(document.items, conversation_id, item_id)]

    return ConversationOut.model_validate((await _change(stores, _place(request, conversation_id), edit)).body)


async def _new_items(stores: ResponseServices, place: Place, items: Sequence[InputItem]) -> list[Data]:
    given = await resolved(stores.responses, place.owner, items, field="items")
    return given_items(given, place.id.removeprefix("conv_"))


async def _change(stores: ResponseServices, place: Place, edit: Any) -> Document:
    """Changes a stored conversation. Raises NotFound, PayloadTooLarge, Conflict, and what ``edit`` raises."""
    try:
        changed = await stores.documents.change(place, edit) if is_conversation(place) else None
    except PayloadTooLarge as error:
        raise _too_large(error) from error
    if changed is None:
        raise missing(place)
    return changed


def _too_large(error: PayloadTooLarge) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the conversation is too large: {error.message}; delete items, or begin another one", param="items"
    )


def _position(items: Sequence[Data], conversation_id: str, item_id: str) -> int:
    for index, item in enumerate(items):
        if item["id"] == item_id:
            return index
    raise NotFound(f"conversation {conversation_id[:80]} has no item {item_id[:80]!r}", param="item_id")


def _page(page: Sequence[Data], *, more: bool) -> Response:
    return json_response(
        {
            "object": "list",
            "data": list(page),
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": more,
        },
        None,
    )


def _place(request: Request, conversation_id: str) -> Place:
    return Place(principal_of(request).id, conversation_id)
