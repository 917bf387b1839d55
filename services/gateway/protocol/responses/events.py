"""The events of a streamed response, as OpenAI's client reads them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import RootModel

from services.gateway.protocol.fields.base import AnswerModel
from services.gateway.protocol.responses.response import (
    OutputItem,
    ResponseOut,
    SummaryPart,
    TextLogprob,
    TextPart,
    ThinkingPart,
)


class Numbered(AnswerModel):
    """Every event."""

    sequence_number: int
    """Number of the event in the stream, from 0 on."""


class ResponseEvent(Numbered):
    """The whole response: at the beginning, and at the end of the stream."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseOut


class OfItem(Numbered):
    """Event of one output item."""

    output_index: int


class ItemEvent(OfItem):
    """An item begins, or has ended."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    item: OutputItem


class InItem(OfItem):
    """Inside of an item."""

    item_id: str


class PartEvent(InItem):
    """The text of a message or of reasoning begins, or has ended."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: TextPart | ThinkingPart


class TextDeltaEvent(InItem):
    """More text of a message."""

    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[TextLogprob]


class TextDoneEvent(InItem):
    """The text of a message."""

    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[TextLogprob]


class ThinkingDeltaEvent(InItem):
    """More reasoning."""

    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ThinkingDoneEvent(InItem):
    """The reasoning."""

    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class SummaryPartEvent(InItem):
    """Reasoning that is told as a summary begins, or has ended."""

    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    summary_index: int
    part: SummaryPart


class SummaryDeltaEvent(InItem):
    """More reasoning, told as a summary."""

    type: Literal["response.reasoning_summary_text.delta"]
    summary_index: int
    delta: str


class SummaryDoneEvent(InItem):
    """The reasoning, told as a summary."""

    type: Literal["response.reasoning_summary_text.done"]
    summary_index: int
    text: str


class ArgumentsDeltaEvent(InItem):
    """More arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(InItem):
    """The arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    arguments: str


class InputDeltaEvent(InItem):
    """More input of a custom tool's call."""

    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class InputDoneEvent(InItem):
    """The input of a custom tool's call."""

    type: Literal["response.custom_tool_call_input.done"]
    input: str


class ResponseStreamEvent(RootModel[Any]):
    """One event; its SSE name is its type."""

    root: (
        ResponseEvent
        | ItemEvent
        | PartEvent
        | TextDeltaEvent
        | TextDoneEvent
        | ThinkingDeltaEvent
        | ThinkingDoneEvent
        | SummaryPartEvent
        | SummaryDeltaEvent
        | SummaryDoneEvent
        | ArgumentsDeltaEvent
        | ArgumentsDoneEvent
        | InputDeltaEvent
        | InputDoneEvent
    )
