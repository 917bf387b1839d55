"""What /v1/messages answers: Anthropic's forms, for the description of the API."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ErrorDetails(_Answer):
    """The cause of an error, for programs."""

    error_code: str | None
    """Stable; those of the other routes' errors."""
    param: str | None
    """The field at fault."""


class AnthropicError(_Answer):
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


class AnthropicErrorBody(_Answer):
    """Every answer that is not a success, and the last event of a stream that failed."""

    type: Literal["error"]
    error: AnthropicError


class TextContent(_Answer):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingContent(_Answer):
    """What the model thought before it went on."""

    type: Literal["thinking"]
    thinking: str
    """Empty where thinking.display is "omitted"."""
    signature: str
    """SHA-256 of the thinking."""


class ToolUseContent(_Answer):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class OutputTokensDetails(_Answer):
    """What the output tokens were spent on."""

    thinking_tokens: int


class MessageUsage(_Answer):
    """Tokens; the prompt has input_tokens + cache_read_input_tokens."""

    input_tokens: int
    """Of the prompt, without those from the cache."""
    cache_creation_input_tokens: Literal[0]
    """Keeping a prompt for the next request costs nothing, so none are counted for it."""
    cache_read_input_tokens: int
    output_tokens: int
    """Thinking included."""
    output_tokens_details: OutputTokensDetails
    service_tier: Literal["standard"]


class MessageAnswer(_Answer):
    """The answer in one piece; the events of a stream add up to it."""

    id: str
    """Also the completion_id that training scores."""
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    """The one that was found."""
    usage: MessageUsage
    adapter: str | None
    """The version that answered; null for the base."""


class TokenCount(_Answer):
    """Length of a prompt."""

    input_tokens: int
