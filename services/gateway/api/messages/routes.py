"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the chat."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from services.gateway.api.base.dependencies import Inference, resource_of
from services.gateway.api.base.openapi import answers_with
from services.gateway.api.base.routing import Routes
from services.gateway.api.base.serving import SESSION_HEADER, answer, json_response, within
from services.gateway.api.messages.content_blocks import MessageBlocks, joined, message_usage, stop_of
from services.gateway.api.messages.context_edits import edited
from services.gateway.api.messages.to_chat import as_chat, named_as_sent, rename
from services.gateway.auth.caller import internal_priority
from services.gateway.auth.route_permissions import INFERENCE, Permission
from services.gateway.core.errors import payload_of
from services.gateway.core.sse import ChunkTemplate, event
from services.gateway.inference.chat import chat_generation, prompt_length
from services.gateway.inference.choice import Choice, Step
from services.gateway.inference.context import InferenceContext
from services.gateway.inference.engine_request import adapter_ref
from services.gateway.inference.generation import Generation, reserve, traceparent_of
from services.gateway.protocol.chat.request import ChatRequest
from services.gateway.protocol.messages.context_edits import ContextManagement
from services.gateway.protocol.messages.request import CountTokensRequest, MessagesRequest, ThinkingAdaptive, ThinkingOn
from services.gateway.protocol.messages.response import (
    AnthropicErrorBody,
    MessageAnswer,
    MessageEvent,
    TokenCount,
    Unmanaged,
)
from services.gateway.text.output_parser import TextDelta

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
    adapter_ref(chat.model, None, served_model_name=context.settings.served_model_name)
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
    """What an answer tells of its request, and of what was made of it."""

    def __init__(self, source: MessagesRequest, chat: ChatRequest) -> None:
        self.source = source
        self._left_out = chat.left_out_tools
        self.managed: dict[str, Any] = {}
        """`context_management` of the answer, if there is one."""

    async def prepare(
        self, request: Request, chat: ChatRequest, context: InferenceContext, session: str | None
    ) -> Generation:
        """What the conversation sends to the engines, without what the model shall not see of it."""
        wanted = self.source.context_management
        if wanted is not None:
            chat, applied = await edited(chat, wanted, partial(prompt_length, context))
            self.managed = {"context_management": {"applied_edits": applied}}
        return await chat_generation(
            context, chat, prefix="msg", clip=True, session=session, traceparent=traceparent_of(request)
        )

    def message(self, generation: Generation, choice: Choice) -> dict[str, Any]:
        """The message before anything is said."""
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
        """The content, which is empty."""
        thinking = self.source.thinking
        omitted = isinstance(thinking, ThinkingOn | ThinkingAdaptive) and thinking.display == "omitted"
        return MessageBlocks(show_thinking=not omitted)

    def stop(self, generation: Generation, step: Step) -> dict[str, str | None]:
        """Why the last step is the last."""
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
    """An event is named by its type."""
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
