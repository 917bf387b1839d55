"""Answers of /v1/responses, as OpenAI's client reads them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.gateway.protocol.completions import SessionUse
from services.gateway.protocol.fields.base import AnswerModel
from services.gateway.protocol.responses.items import ItemStatus

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class TopLogprob(AnswerModel):
    """An alternative to a token."""

    token: str
    logprob: float
    bytes: list[int]


class TextLogprob(TopLogprob):
    """A token of the text; natural logarithms."""

    top_logprobs: list[TopLogprob]


class TextPart(AnswerModel):
    """Text that the model wrote."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    """Always empty."""
    logprobs: list[TextLogprob]


class ReadPart(AnswerModel):
    """Text that the model read."""

    type: Literal["input_text"]
    text: str


class RefusalPart(AnswerModel):
    """What a model said instead of an answer, as the client sent it."""

    type: Literal["refusal"]
    refusal: str


class MessageOut(AnswerModel):
    """A message of the model."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[TextPart]


class FunctionCallOut(AnswerModel):
    """A call of a function of the client."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    """Namespace of the function; absent where it is in none."""
    arguments: str


class CustomCallOut(AnswerModel):
    """A call of a custom tool of the client."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    """Namespace of the tool; absent where it is in none."""
    input: str


class ThinkingPart(AnswerModel):
    """Reasoning itself."""

    type: Literal["reasoning_text"]
    text: str


class SummaryPart(AnswerModel):
    """Reasoning as a summary, under reasoning.summary."""

    type: Literal["summary_text"]
    text: str


class ReasoningOut(AnswerModel):
    """What the model thought."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[SummaryPart]
    content: list[ThinkingPart]


OutputItem = MessageOut | FunctionCallOut | CustomCallOut | ReasoningOut


class MessageIn(AnswerModel):
    """A message that the model read."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["user", "assistant", "system", "developer"]
    content: list[ReadPart | TextPart | RefusalPart]


class FunctionOutputIn(AnswerModel):
    """What a function answered."""

    id: str
    type: Literal["function_call_output"]
    status: ItemStatus
    call_id: str
    output: str | list[ReadPart]
    name: str | None = None
    namespace: str | None = None


class CustomOutputIn(AnswerModel):
    """What a custom tool answered."""

    id: str
    type: Literal["custom_tool_call_output"]
    status: ItemStatus
    call_id: str
    output: str | list[ReadPart]
    name: str | None = None
    namespace: str | None = None


InputItemOut = MessageIn | FunctionCallOut | FunctionOutputIn | CustomCallOut | CustomOutputIn | ReasoningOut


class FailureOut(AnswerModel):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteOut(AnswerModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class InputTokenDetails(AnswerModel):
    """Details of the tokens of the prompt."""

    cached_tokens: int
    """Tokens from the prefix cache."""
    cache_write_tokens: int
    """Always 0: what the cache keeps costs nothing and is not counted."""


class OutputTokenDetails(AnswerModel):
    """Details of the tokens of the answer."""

    reasoning_tokens: int


class UsageOut(AnswerModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokenDetails
    output_tokens: int
    output_tokens_details: OutputTokenDetails
    total_tokens: int
    session: SessionUse | None = None
    """Absent without the header X-Session-Id."""


class ReasoningEcho(AnswerModel):
    """The request's reasoning."""

    effort: str | None
    summary: str | None


class CustomEcho(AnswerModel):
    """A custom tool of the request."""

    type: Literal["custom"]
    name: str
    description: str | None
    format: dict[str, Any]


class NamespaceEcho(AnswerModel):
    """A namespace of the request."""

    type: Literal["namespace"]
    name: str
    description: str
    """Empty where the request has none."""
    tools: list[ToolEcho | CustomEcho]


class ToolEcho(AnswerModel):
    """A function of the request."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class ConversationOf(AnswerModel):
    """The conversation of a response."""

    id: str


class ResponseOut(AnswerModel):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    error: FailureOut | None
    incomplete_details: IncompleteOut | None
    model: str
    adapter: str | None
    """The version that answered; null: the model without adapter, or nothing has answered yet."""
    completion_id: str | None
    """What POST /v1/train/grpo takes to score the answer; null until it is finished."""
    instructions: str | None
    previous_response_id: str | None
    conversation: ConversationOf | None = None
    """The one that input and answer are added to when the response ends. null also when that could not be done."""
    output: list[OutputItem]
    tools: list[ToolEcho | CustomEcho | NamespaceEcho]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: ReasoningEcho
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    store: bool
    """Whether the response is kept. false also when that was asked for but could not be done."""
    metadata: dict[str, str]
    service_tier: Literal["default"]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    usage: UsageOut | None
    left_out_tools: list[str] | None = None
    """Types of hosted tools that were sent and not offered; absent where there are none."""


class DeletedOut(AnswerModel):
    """A response that is not kept any more."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemsOut(AnswerModel):
    """A page of what a response was given."""

    object: Literal["list"]
    data: list[InputItemOut]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokensOut(AnswerModel):
    """How long a prompt is."""

    object: Literal["response.input_tokens"]
    input_tokens: int = Field(ge=1)
