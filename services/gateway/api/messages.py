"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the chat."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from services.gateway.api.answers import SESSION_HEADER, answer, json_response, within
from services.gateway.api.chat import prepare_chat
from services.gateway.api.described import answers_with
from services.gateway.api.routing import router
from services.gateway.choices import Choice, Step
from services.gateway.errors import payload_of
from services.gateway.generation import Generation, reserve
from services.gateway.message_blocks import MessageBlocks, joined, message_usage, stop_of
from services.gateway.messages import as_chat, named_as_sent, rename
from services.gateway.policies import adapter_ref
from services.gateway.prompts import chat_prompt
from services.gateway.schemas.chat import ChatRequest
from services.gateway.schemas.message_answers import AnthropicErrorBody, MessageAnswer, MessageEvent, TokenCount
from services.gateway.schemas.messages import CountTokensRequest, MessagesRequest, ThinkingAdaptive, ThinkingOn
from services.gateway.sse import EventTemplate, event
from services.gateway.state import GatewayDep, gateway_of
from services.gateway.text.chat import TextDelta

routes = router("messages", errors=AnthropicErrorBody)
_ROUTE = "/v1/messages"
_PING = event({"type": "ping"}, name="ping")


@routes.post(_ROUTE, responses=answers_with(MessageAnswer, stream=MessageEvent), openapi_extra=SESSION_HEADER)
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answers a conversation in Anthropic's form."""
    gateway = gateway_of(request)
    chat = as_chat(body)
    reservation = reserve(gateway, chat, prompts=1)
    with named_as_sent():
        return await answer(
            request,
            chat,
            gateway,
            reservation,
            prepare=partial(prepare_chat, prefix="msg", clip=True),
            chunks=partial(_events, source=body),
            complete=partial(_complete, source=body),
            failed=_failed,
        )


@routes.post(f"{_ROUTE}/count_tokens")
async def count_message_tokens(request: Request, body: CountTokensRequest, gateway: GatewayDep) -> TokenCount:
    """How many tokens the prompt of such a message has: usage.input_tokens + usage.cache_read_input_tokens of it."""
    chat = as_chat(body)
    adapter_ref(chat.model, None, served_model_name=gateway.settings.served_model_name)
    reservation = reserve(gateway, chat, prompts=1)
    with named_as_sent():
        prompt = await within(reservation, request, chat_prompt(gateway.engines.served, chat, gateway.settings))
    return TokenCount(input_tokens=len(prompt))


def _message(generation: Generation, choice: Choice) -> dict[str, Any]:
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
    }


def _blocks(source: MessagesRequest) -> MessageBlocks:
    thinking = source.thinking
    omitted = isinstance(thinking, ThinkingOn | ThinkingAdaptive) and thinking.display == "omitted"
    return MessageBlocks(show_thinking=not omitted)


def _stop(generation: Generation, source: MessagesRequest, step: Step) -> dict[str, str | None]:
    clipped = generation.jobs[0].max_tokens < source.max_tokens
    return stop_of(step.choice, step.finish_reason or "stop", clipped=clipped)


class _EventWriter:
    """Makes the events of one stream."""

    def __init__(self, generation: Generation, source: MessagesRequest) -> None:
        self._generation = generation
        self._source = source
        self._blocks = _blocks(source)
        self._template: EventTemplate | None = None
        """Of more text of the open block, which most steps are."""

    def write(self, step: Step) -> list[bytes]:
        """The events of one step."""
        written = []
        if step.first:
            start = {"type": "message_start", "message": _message(self._generation, step.choice)}
            written += [_named(start), _PING]
        for delta in step.deltas:
            if isinstance(delta, TextDelta) and self._blocks.continues(delta):
                written.append(self._more_text(delta.text))
            else:
                self._template = None
                written += map(_named, self._blocks.take(delta))
        if step.finish_reason is not None:
            written += map(_named, self._blocks.close())
            stop = _stop(self._generation, self._source, step)
            written.append(_named({"type": "message_delta", "delta": stop, "usage": message_usage(step.choice)}))
            written.append(_named({"type": "message_stop"}))
        return written

    def _more_text(self, text: str) -> bytes:
        if self._template is None:
            mark = uuid.uuid4().hex
            (more,) = self._blocks.take(TextDelta(mark))
            self._template = EventTemplate(more, [mark], name=more["type"])
        return self._template.fill(text)


def _failed(error: Exception) -> bytes:
    """The last event of a stream that fails."""
    rename(error)
    return _named(payload_of(error, _ROUTE))


def _named(payload: dict[str, Any]) -> bytes:
    """An event is named by its type."""
    return event(payload, name=payload["type"])


async def _events(generation: Generation, _: ChatRequest, *, source: MessagesRequest) -> AsyncGenerator[bytes, None]:
    writer = _EventWriter(generation, source)
    async with aclosing(generation.steps()) as steps:
        async for step in steps:
            for written in writer.write(step):
                yield written


async def _complete(generation: Generation, _: ChatRequest, *, source: MessagesRequest) -> Response:
    blocks = _blocks(source)
    events = []
    stop: dict[str, str | None] = {}
    async with aclosing(generation.steps()) as steps:
        async for step in steps:
            for delta in step.deltas:
                events += blocks.take(delta)
            if step.finish_reason is not None:
                stop = _stop(generation, source, step)
    choice = generation.choices[0]
    whole = _message(generation, choice) | {"content": joined([*events, *blocks.close()])} | stop
    return json_response(whole, choice.adapter)
