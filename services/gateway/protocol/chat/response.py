"""What POST /v1/chat/completions answers. The handler writes the bytes itself; these describe them."""

from __future__ import annotations

from typing import Literal

from services.gateway.protocol.completions.response import Answer, CompletionUsage, PromptToken

FinishReason = Literal["stop", "length", "tool_calls"]


class TopLogprob(Answer):
    """An alternative to a token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobEntry(TopLogprob):
    """A sampled token."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Answer):
    """Log-probabilities of every token that is text: of the reasoning and of tool calls as well."""

    content: list[TokenLogprobEntry]
    refusal: None = None


class FunctionCall(Answer):
    """A call of a function."""

    name: str
    arguments: str
    """A JSON object, as text."""


class AnsweredToolCall(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(Answer):
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


class TokensOfChoice(Answer):
    """What return_token_ids adds to a choice."""

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


class ChatCompletion(Answer):
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


class FunctionDelta(Answer):
    """More of a call."""

    name: str | None = None
    arguments: str


class ToolCallDelta(Answer):
    """More of a call; the first of one has its id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(Answer):
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


class ChatCompletionChunk(Answer):
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
