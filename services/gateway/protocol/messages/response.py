"""Answers of /v1/messages in Anthropic's forms, for the description of the API."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import RootModel

from services.gateway.protocol.completions import SessionUse
from services.gateway.protocol.fields.base import AnswerModel


class ErrorDetails(AnswerModel):
    """The cause of an error, for programs."""

    error_code: str | None
    """Stable; those of the other routes' errors."""
    param: str | None
    """The field at fault."""


class AnthropicError(AnswerModel):
    """What went wrong."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "rate_limit_error",
        "timeout_error",
        "api_error",
        "overloaded_error",
    ]
    message: str
    details: ErrorDetails


class AnthropicErrorBody(AnswerModel):
    """Every answer that is not a success, and the last event of a stream that failed."""

    type: Literal["error"]
    error: AnthropicError


class TextContent(AnswerModel):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingContent(AnswerModel):
    """What the model thought before it went on."""

    type: Literal["thinking"]
    thinking: str
    """Empty where thinking.display is "omitted"."""
    signature: str
    """SHA-256 of the thinking."""


class ToolUseContent(AnswerModel):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = TextContent | ThinkingContent | ToolUseContent
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class OutputTokensDetails(AnswerModel):
    """What the output tokens were spent on."""

    thinking_tokens: int


class UsageSoFar(AnswerModel):
    """Tokens; the prompt has input_tokens + cache_read_input_tokens."""

    input_tokens: int
    """Tokens of the prompt, without those from the cache."""
    cache_creation_input_tokens: Literal[0]
    """Keeping a prompt for the next request costs nothing, so none are counted for it."""
    cache_read_input_tokens: int
    output_tokens: int
    """Thinking included."""
    output_tokens_details: OutputTokensDetails
    session: SessionUse | None = None
    """Absent without the header X-Session-Id."""


class MessageUsage(UsageSoFar):
    """Usage of a message."""

    service_tier: Literal["standard"]


class ClearedThinking(AnswerModel):
    """Thinking that the model was not shown."""

    type: Literal["clear_thinking_20251015"]
    cleared_thinking_turns: int
    cleared_input_tokens: int
    """Tokens by which the prompt is shorter."""


class ClearedToolUses(AnswerModel):
    """Results of tools that the model was not shown."""

    type: Literal["clear_tool_uses_20250919"]
    cleared_tool_uses: int
    cleared_input_tokens: int
    """Tokens by which the prompt is shorter."""


class ContextManaged(AnswerModel):
    """What context_management left out of the prompt."""

    applied_edits: list[ClearedThinking | ClearedToolUses]
    """Edits that left something out."""


class _Message(AnswerModel):
    id: str
    """Also the completion_id that training scores."""
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    adapter: str | None
    """The version that answered; null for the base."""
    left_out_tools: list[str] | None = None
    """Types of hosted tools that were sent and not offered; absent where there are none."""
    context_management: ContextManaged | None = None
    """Absent where the request has none."""


class MessageAnswer(_Message):
    """The answer in one piece; the events of a stream add up to it."""

    content: list[Block]
    stop_reason: StopReason
    stop_sequence: str | None
    """The one that was found."""
    usage: MessageUsage


# -- events


class StartedMessage(_Message):
    """A message that has nothing yet."""

    content: list[Block]
    """Empty."""
    stop_reason: None
    stop_sequence: None
    usage: MessageUsage


class MessageStart(AnswerModel):
    """The first event: the engine has begun."""

    type: Literal["message_start"]
    message: StartedMessage


class Ping(AnswerModel):
    """Nothing has happened."""

    type: Literal["ping"]


class BlockStart(AnswerModel):
    """A block begins; it is empty."""

    type: Literal["content_block_start"]
    index: int
    content_block: Block


class TextMore(AnswerModel):
    """More of a text."""

    type: Literal["text_delta"]
    text: str


class ThinkingMore(AnswerModel):
    """More of what is thought."""

    type: Literal["thinking_delta"]
    thinking: str


class Signature(AnswerModel):
    """The signature of a thinking block, which is at its end."""

    type: Literal["signature_delta"]
    signature: str


class InputMore(AnswerModel):
    """More of the JSON of a call's input."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(AnswerModel):
    """More of the block that began last."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextMore | ThinkingMore | Signature | InputMore


class BlockStop(AnswerModel):
    """The block is complete."""

    type: Literal["content_block_stop"]
    index: int


class Stop(AnswerModel):
    """Why the message ends."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(AnswerModel):
    """The message is complete."""

    type: Literal["message_delta"]
    delta: Stop
    usage: UsageSoFar
    """Usage of the whole message."""
    context_management: ContextManaged | None = None
    """Absent where the request has none."""


class MessageStop(AnswerModel):
    """The last event."""

    type: Literal["message_stop"]


class MessageEvent(
    RootModel[
        MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | AnthropicErrorBody
    ]
):
    """An event of a stream, named by its type."""


class Unmanaged(AnswerModel):
    """The prompt before context_management."""

    original_input_tokens: int


class TokenCount(AnswerModel):
    """Length of a prompt."""

    input_tokens: int
    """Tokens of the prompt as context_management leaves it."""
    context_management: Unmanaged | None = None
    """Null where the request has none."""
