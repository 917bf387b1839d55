"""Answers of POST /v1/chat/completions, and of GET, update and DELETE of stored ones.

The handler of POST writes the bytes itself; these describe them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from services.gateway.protocol.chat_request import Metadata
from services.gateway.protocol.completions import CompletionUsage, PromptToken
from services.gateway.protocol.fields.base import AnswerModel, RequestModel

FinishReason = Literal["stop", "length", "tool_calls"]


class TopLogprob(AnswerModel):
    """An alternative to a token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobEntry(TopLogprob):
    """A sampled token."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(AnswerModel):
    """Log-probabilities of every token that is text: of the reasoning and of tool calls as well."""

    content: list[TokenLogprobEntry]
    refusal: None = None


class FunctionCall(AnswerModel):
    """A call of a function."""

    name: str
    arguments: str
    """A JSON object, as text."""


class AnsweredToolCall(AnswerModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(AnswerModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    """null when there are calls and no text."""
    refusal: None = None
    reasoning: str | None = None
    """The thinking before the content, if there is any."""
    reasoning_content: str | None = None
    """Other name of reasoning."""
    tool_calls: list[AnsweredToolCall] | None = None


class TokensOfChoice(AnswerModel):
    """Fields that return_token_ids adds to a choice."""

    token_ids: list[int] | None = None
    """Every sampled token, the one that ended the completion included."""
    sampling_logprobs: list[float] | None = None
    """Log-probability of each token, under the distribution it was drawn from."""


class AnswerChoice(TokensOfChoice):
    """One completion."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason
    """"tool_calls" whenever the message has calls and was not cut off, forced ones included."""
    completion_id: str
    """What a job takes to score it."""
    adapter: str | None


class ChatCompletion(AnswerModel):
    """An answer in one piece."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    adapter: str | None
    """The version that answered; null: the model without adapter."""
    choices: list[AnswerChoice]
    usage: CompletionUsage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptToken] | None] | None = None
    """Log-probabilities by token id; null for the first token. With prompt_logprobs."""
    metadata: dict[str, str] | None = None
    service_tier: Literal["default"] | None = None
    """Where the request names one."""
    left_out_tools: list[str] | None = None
    """Types of hosted tools that were sent and not offered; absent where there are none."""
    store: bool | None = None
    """Where store was asked for: whether the completion is kept."""


class FunctionDelta(AnswerModel):
    """More of a call."""

    name: str | None = None
    arguments: str


class ToolCallDelta(AnswerModel):
    """More of a call; the first of one has its id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(AnswerModel):
    """More of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(TokensOfChoice):
    """More of one completion."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None
    completion_id: str


class ChatCompletionChunk(AnswerModel):
    """The data of one event of a stream. A stream ends with `[DONE]`, or with an object that has `error`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    adapter: str | None
    choices: list[ChunkChoice]
    """None in the chunk of stream_options.include_usage."""
    usage: CompletionUsage | None = None
    prompt_token_ids: list[int] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["default"] | None = None
    """Where the request names one."""
    left_out_tools: list[str] | None = None
    """Types of hosted tools that were sent and not offered; absent where there are none."""


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
