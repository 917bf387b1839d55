"""/v1/conversations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from services.gateway.protocol.chat.request import Metadata
from services.gateway.protocol.fields.base import RequestModel
from services.gateway.protocol.responses.items import InputItem
from services.gateway.protocol.responses.response import AnswerModel, InputItemOut

MAX_ADDED = 20
"""Items at a time, as at OpenAI."""


class ConversationRequest(RequestModel):
    """A new conversation."""

    items: Annotated[list[InputItem], Field(max_length=MAX_ADDED)] | None = None
    """What it begins with."""
    metadata: Metadata | None = None


class ItemsRequest(RequestModel):
    """More items of a conversation."""

    items: Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ADDED)]


class ConversationOut(AnswerModel):
    """A conversation."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(AnswerModel):
    """A conversation that is not kept any more."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class ConversationItemsOut(AnswerModel):
    """A page of a conversation's items."""

    object: Literal["list"]
    data: list[InputItemOut]
    first_id: str | None
    last_id: str | None
    has_more: bool
