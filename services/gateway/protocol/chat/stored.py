"""GET, update and DELETE of /v1/chat/completions/{id}."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from services.gateway.protocol.chat.request import Metadata
from services.gateway.protocol.chat.response import AnsweredToolCall, ChatCompletion
from services.gateway.protocol.fields.base import RequestModel


class MetadataRequest(RequestModel):
    """Other metadata of something that is kept."""

    metadata: Metadata | None
    """Metadata in the place of what it had; null: none."""


class ChatList(BaseModel):
    """A page of stored completions."""

    object: Literal["list"] = "list"
    data: list[ChatCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredPart(BaseModel):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class StoredMessage(BaseModel):
    """A message that a completion was given."""

    id: str
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None
    name: str | None
    content_parts: list[StoredPart] | None
    """The pieces, where it came in some; `content` is all of them together."""
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredToolCall] | None = None


class StoredMessageList(BaseModel):
    """A page of messages."""

    object: Literal["list"] = "list"
    data: list[StoredMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedChat(BaseModel):
    """What DELETE answers."""

    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: Literal[True] = True
