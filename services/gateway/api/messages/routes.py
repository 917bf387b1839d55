"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the chat.

The answer consists of content blocks: the same events make a stream and the message in one piece."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import from_json

from services.common.text.output_parser import Delta, TextDelta
from services.common.text.tool_calls.parser import ToolDelta
from services.gateway.api.base.openapi import answers_with
from services.gateway.api.base.routing import Inference, Routes, resource_of
from services.gateway.api.base.serving import SESSION_HEADER, answer, json_response, within
from services.gateway.api.messages.to_chat import as_chat, edited, named_as_sent, rename
from services.gateway.auth.caller import internal_priority
from services.gateway.auth.route_permissions import INFERENCE, Permission
from services.gateway.core.errors import payload_of
from services.gateway.core.sse import ChunkTemplate, event
from services.gateway.inference.chat import chat_generation, prompt_length
from services.gateway.inference.choice import Choice, Step
from services.gateway.inference.context import InferenceContext
from services.gateway.inference.engine_request import policy_ref
from services.gateway.inference.generation import Generation, reserve, traceparent_of
from services.gateway.protocol.chat_request import ChatRequest
from services.gateway.protocol.messages.context_edits import ContextManagement
from services.gateway.protocol.messages.request import CountTokensRequest, MessagesRequest, ThinkingAdaptive, ThinkingOn
from services.gateway.protocol.messages.response import (
    AnthropicErrorBody,
    MessageAnswer,
    MessageEvent,
    TokenCount,
    Unmanaged,
)

_CALL, _TOOL_USE = "call_", "toolu_"

BlockEvent = dict[str, Any]


class MessageBlocks:
    """Splits the deltas of one choice into blocks.

    Args:
        show_thinking: thinking blocks have their text; otherwise they are empty.
    """

    def __init__(self, *, show_thinking: bool = True) -> None:
        self._show_thinking = show_thinking
        self._open: str | None = None
        """Kind of the block that may grow: "text", "thinking", or the id of a call."""
        self._index = -1
        self._thought = hashlib.sha256()

    @property
    def index(self) -> int:
        """Number of the block that was begun last."""
        return self._index

    def continues(self, delta: TextDelta) -> bool:
        """True if a delta only adds text to the open block."""
        return self._open == "text" and not delta.reasoning

    def take(self, delta: Delta) -> list[BlockEvent]:
        """The events of one delta."""
        if isinstance(delta, ToolDelta):
            return self._take_call(delta)
        if delta.reasoning:
            self._thought.update(delta.text.encode())
            events = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return [*events, *self._more("thinking", delta.text)] if self._show_thinking else events
        return [*self._begin("text", {"type": "text", "text": ""}), *self._more("text", delta.text)]

    def close(self) -> list[BlockEvent]:
        """Events that end the open block, if there is one."""
        if self._open is None:
            return []
        events = [{"type": "content_block_stop", "index": self._index}]
        if self._open == "thinking":
            # Clients drop thinking that is not signed.
            delta = {"type": "signature_delta", "signature": self._thought.hexdigest()}
            events.insert(0, {"type": "content_block_delta", "index": self._index, "delta": delta})
            self._thought = hashlib.sha256()
        self._open = None
        return events

    def _take_call(self, delta: ToolDelta) -> list[BlockEvent]:
        events = []
        if delta.name is not None and delta.call_id is not None:
            call_id = _TOOL_USE + delta.call_id.removeprefix(_CALL)
            events = self._begin(call_id, {"type": "tool_use", "id": call_id, "name": delta.name, "input": {}})
        return [*events, *self._more("input_json", delta.arguments)] if delta.arguments else events

    def _begin(self, kind: str, block: dict[str, Any]) -> list[BlockEvent]:
        if self._open == kind:
            return []
        events = self.close()
        self._open = kind
        self._index += 1
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _more(self, kind: str, text: str) -> list[BlockEvent]:
        field = "partial_json" if kind == "input_json" else kind
        delta = {"type": f"{kind}_delta", field: text}
        return [{"type": "content_block_delta", "index": self._index, "delta": delta}]


def joined(events: Sequence[BlockEvent]) -> list[dict[str, Any]]:
    """Content blocks of a whole answer, made of its events."""
    blocks: list[dict[str, Any]] = []
    pieces: list[list[str]] = []
    for entry in events:
        match entry["type"]:
            case "content_block_start":
                blocks.append(dict(entry["content_block"]))
                pieces.append([])
            case "content_block_delta":
                delta = entry["delta"]
                if delta["type"] == "signature_delta":
                    blocks[-1]["signature"] = delta["signature"]
                else:
                    pieces[-1].append(delta[next(field for field in delta if field != "type")])
    for block, texts in zip(blocks, pieces, strict=True):
        text = "".join(texts)
        if block["type"] != "tool_use":
            block[block["type"]] = text
        elif text:
            block["input"] = _input(text)
    return blocks


def _input(text: str) -> dict[str, Any]:
    """Arguments of a call as an object. If max_tokens or a stop cut the call off, the object has the values that are
    complete, as anthropic-python reads the stream."""
    try:
        parsed: dict[str, Any] = from_json(text, allow_partial=True)
    except ValueError:
        # It is nested deeper than parsers of JSON go, so clients would not read it as an object either.
        parsed = {"arguments": text}
    return parsed


def stop_of(choice: Choice, finish_reason: str, *, clipped: bool) -> dict[str, str | None]:
    """`stop_reason` and `stop_sequence`.

    Args:
        choice: a finished one.
        finish_reason: OpenAI's.
        clipped: its tokens were limited by the context, not by max_tokens.
    """
    if finish_reason == "length":
        return {"stop_reason": "model_context_window_exceeded" if clipped else "max_tokens", "stop_sequence": None}
    if finish_reason == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    found = choice.stopped_by
    return {"stop_reason": "end_turn" if found is None else "stop_sequence", "stop_sequence": found}


def message_usage(choice: Choice) -> dict[str, Any]:
    """Token counts so far, and where the client's session is."""
    counts: dict[str, Any] = {
        "input_tokens": choice.prompt_tokens - choice.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": choice.cached_tokens,
        "output_tokens": choice.tokens,
        "output_tokens_details": {"thinking_tokens": choice.reasoning_tokens},
    }
    return counts if choice.session is None else counts | {"session": choice.session}


routes = Routes("messages", errors=AnthropicErrorBody)
_ROUTE = "/v1/messages"
_PING = event({"type": "ping"}, name="ping")


@routes.post(
    _ROUTE,
    Permission(INFERENCE, generates=True),
    batches=MessagesRequest,
    responses=answers_with(MessageAnswer, stream=MessageEvent),
    openapi_extra=SESSION_HEADER,
)
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answers a conversation in Anthropic's form."""
    context = resource_of(request, InferenceContext)
    chat = as_chat(body)
    if (priority := internal_priority(request)) is not None:
        chat = chat.model_copy(update={"priority": priority})
    reservation = reserve(context, chat, prompts=1)
    told = _Told(body, chat)
    with named_as_sent():
        return await answer(
            request,
            chat,
            context,
            reservation,
            prepare=told.prepare,
            chunks=partial(_events, told=told),
            complete=partial(_complete, told=told),
            failed=_failed,
        )


@routes.post(f"{_ROUTE}/count_tokens", Permission(INFERENCE), response_model_exclude_none=True)
async def count_message_tokens(request: Request, body: CountTokensRequest, context: Inference) -> TokenCount:
    """How many tokens the prompt of such a message has: usage.input_tokens + usage.cache_read_input_tokens of it."""
    chat = as_chat(body)
    policy_ref(chat, served_model_name=context.settings.served_model_name)
    reservation = reserve(context, chat, prompts=1)
    with named_as_sent():
        return await within(reservation, request, _count(context, chat, body.context_management))


async def _count(context: InferenceContext, chat: ChatRequest, wanted: ContextManagement | None) -> TokenCount:
    tokens = await prompt_length(context, chat)
    if wanted is None:
        return TokenCount(input_tokens=tokens)
    shown, applied = await edited(chat, wanted, partial(prompt_length, context))
    left = await prompt_length(context, shown) if applied else tokens
    return TokenCount(input_tokens=left, context_management=Unmanaged(original_input_tokens=tokens))


class _Told:
    """Parts of an answer that depend on its request, such as the tools and the context that were left out."""

    def __init__(self, source: MessagesRequest, chat: ChatRequest) -> None:
        self.source = source
        self._left_out = chat.left_out_tools
        self.managed: dict[str, Any] = {}
        """`context_management` of the answer, if there is one."""

    async def prepare(
        self, request: Request, chat: ChatRequest, context: InferenceContext, session: str | None
    ) -> Generation:
        """Generation of the answer, from the conversation without what its edits leave out."""
        wanted = self.source.context_management
        if wanted is not None:
            chat, applied = await edited(chat, wanted, partial(prompt_length, context))
            self.managed = {"context_management": {"applied_edits": applied}}
        return await chat_generation(
            context, chat, prefix="msg", clip=True, session=session, traceparent=traceparent_of(request)
        )

    def message(self, generation: Generation, choice: Choice) -> dict[str, Any]:
        """Message before it has any content."""
        left_out = {"left_out_tools": self._left_out} if self._left_out else {}
        return {
            "id": generation.id,
            "type": "message",
            "role": "assistant",
            "model": generation.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": message_usage(choice) | {"service_tier": "standard"},
            "adapter": choice.adapter,
            **left_out,
            **self.managed,
        }

    def blocks(self) -> MessageBlocks:
        """Blocks of the content, none of which has begun."""
        thinking = self.source.thinking
        omitted = isinstance(thinking, ThinkingOn | ThinkingAdaptive) and thinking.display == "omitted"
        return MessageBlocks(show_thinking=not omitted)

    def stop(self, generation: Generation, step: Step) -> dict[str, str | None]:
        """Reason why the message ends with its last step."""
        clipped = generation.specs[0].max_tokens < self.source.max_tokens
        return stop_of(step.choice, step.finish_reason or "stop", clipped=clipped)


class _EventWriter:
    """Makes the events of one stream."""

    def __init__(self, generation: Generation, told: _Told) -> None:
        self._generation = generation
        self._told = told
        self._blocks = told.blocks()
        self._template: ChunkTemplate | None = None
        """Template of chunks of more text of the open block, which most steps are."""

    def write(self, step: Step) -> list[bytes]:
        """The events of one step."""
        written = []
        if step.first:
            start = {"type": "message_start", "message": self._told.message(self._generation, step.choice)}
            written += [_named(start), _PING]
        for delta in step.deltas:
            if isinstance(delta, TextDelta) and self._blocks.continues(delta):
                written.append(self._more_text(delta.text))
            else:
                self._template = None
                written += map(_named, self._blocks.take(delta))
        if step.finish_reason is not None:
            written += map(_named, self._blocks.close())
            stop, counts = self._told.stop(self._generation, step), message_usage(step.choice)
            written.append(_named({"type": "message_delta", "delta": stop, "usage": counts, **self._told.managed}))
            written.append(_named({"type": "message_stop"}))
        return written

    def _more_text(self, text: str) -> bytes:
        if self._template is None:

            def write(text: str) -> bytes:
                (more,) = self._blocks.take(TextDelta(text))
                return _named(more)

            self._template = ChunkTemplate(write, 1)
        return self._template.fill(text)


def _failed(error: Exception) -> bytes:
    """The last event of a stream that fails."""
    rename(error)
    return _named(payload_of(error, _ROUTE))


def _named(payload: dict[str, Any]) -> bytes:
    """Encoded event, named by its type."""
    return event(payload, name=payload["type"])


async def _events(generation: Generation, _: ChatRequest, *, told: _Told) -> AsyncGenerator[bytes, None]:
    writer = _EventWriter(generation, told)
    async with aclosing(generation.steps()) as steps:
        async for step in steps:
            for written in writer.write(step):
                yield written


async def _complete(generation: Generation, _: ChatRequest, *, told: _Told) -> Response:
    blocks = told.blocks()
    events = []
    stop: dict[str, str | None] = {}
    async with aclosing(generation.steps()) as steps:
        async for step in steps:
            for delta in step.deltas:
                events += blocks.take(delta)
            if step.finish_reason is not None:
                stop = told.stop(generation, step)
    choice = generation.choices[0]
    whole = told.message(generation, choice) | {"content": joined([*events, *blocks.close()])} | stop
    return json_response(whole, choice.adapter)
