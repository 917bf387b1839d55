"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from services.common.text.output_parser import Delta, TextDelta
from services.gateway.api.base.openapi import answers_with
from services.gateway.api.base.routing import Routes, resource_of
from services.gateway.api.base.serving import SESSION_HEADER, answer, json_response
from services.gateway.api.completions.stored_chats import ChatKeeper
from services.gateway.api.responses.serving import ResponseServices
from services.gateway.auth.caller import principal_of
from services.gateway.auth.route_permissions import INFERENCE, Permission
from services.gateway.core.sse import DONE, ChunkTemplate, event
from services.gateway.inference.chat import chat_generation
from services.gateway.inference.choice import Step, usage
from services.gateway.inference.context import InferenceContext
from services.gateway.inference.generation import Generation, reserve, traceparent_of
from services.gateway.inference.logprobs import TokenLogprob, by_token, chat_logprobs
from services.gateway.protocol.chat_request import ChatRequest
from services.gateway.protocol.chat_response import ChatCompletion, ChatCompletionChunk

routes = Routes("completions")


@routes.post(
    "/v1/chat/completions",
    Permission(INFERENCE, generates=True),
    batches=ChatRequest,
    responses=answers_with(ChatCompletion, stream=ChatCompletionChunk, done=True),
    openapi_extra=SESSION_HEADER,
)
async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    """Answers a conversation."""
    context = resource_of(request, InferenceContext)
    reservation = reserve(context, body, prompts=1)
    keeper = None
    if body.store:
        keeper = ChatKeeper(resource_of(request, ResponseServices), principal_of(request).id, body)
    return await answer(
        request,
        body,
        context,
        reservation,
        prepare=_prepare,
        chunks=partial(_chunks, keeper=keeper),
        complete=partial(_complete, keeper=keeper),
    )


async def _prepare(request: Request, body: ChatRequest, context: InferenceContext, session: str | None) -> Generation:
    return await chat_generation(context, body, session=session, traceparent=traceparent_of(request))


def _echoes(body: ChatRequest) -> dict[str, Any]:
    """Fields that an answer has once, about its request."""
    told: dict[str, Any] = {}
    if body.metadata:
        told["metadata"] = body.metadata
    if body.service_tier is not None:
        told["service_tier"] = "default"
    if body.left_out_tools:
        told["left_out_tools"] = body.left_out_tools
    return told


# -- streamed


def _delta(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, TextDelta):
        # Reasoning has two names: vLLM's present one, and its older one, which DeepSeek's API has. Clients read either.
        return dict.fromkeys(("reasoning", "reasoning_content") if delta.reasoning else ("content",), delta.text)
    if delta.name is not None:
        function = {"name": delta.name, "arguments": delta.arguments}
        call = {"index": delta.index, "id": delta.call_id, "type": "function", "function": function}
    else:
        call = {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {"tool_calls": [call]}


class _ChunkWriter:
    """Makes the chunks of one stream."""

    def __init__(self, generation: Generation, body: ChatRequest) -> None:
        self._generation = generation
        self._body = body
        self._unsent: dict[int, list[TokenLogprob]] = {choice.index: [] for choice in generation.choices}
        self._templates: dict[tuple[int, bool], ChunkTemplate] = {}

    def write(self, step: Step) -> list[bytes]:
        """Chunks of one step; none, if the step adds nothing that a client could see."""
        body, index = self._body, step.choice.index
        plain = not step.first and step.finish_reason is None and not body.logprobs and not body.usage_in_chunks
        if plain and len(step.deltas) == 1:
            delta = step.deltas[0]
            if isinstance(delta, TextDelta):
                return [self._more_text(step, delta)]
        return self._write(step, index)

    def _more_text(self, step: Step, delta: TextDelta) -> bytes:
        """Chunk of a step that only adds text, as most do, filled into a template."""
        tokens = (step.token_ids, step.sampling_logprobs) if self._body.return_token_ids else ()
        key = step.choice.index, delta.reasoning
        template = self._templates.get(key)
        if template is None:

            def write(text: str, token_ids: Any = (), sampling_logprobs: Any = ()) -> bytes:
                deltas: list[Delta] = [replace(delta, text=text)]
                (chunk,) = self._write(
                    replace(step, deltas=deltas, token_ids=token_ids, sampling_logprobs=sampling_logprobs), key[0]
                )
                return chunk

            template = self._templates[key] = ChunkTemplate(write, 1 + len(tokens))
        return template.fill(delta.text, *tokens)

    def _write(self, step: Step, index: int) -> list[bytes]:
        body = self._body
        deltas: list[dict[str, Any]] = [_delta(delta) for delta in step.deltas]
        self._unsent[index] += step.piece.entries
        if step.first:
            deltas.insert(0, {"role": "assistant", "content": ""})
        if not deltas and (step.finish_reason is not None or (body.return_token_ids and step.token_ids)):
            deltas.append({})
        if step.finish_reason is not None and deltas[-1]:
            deltas.append({})
        chunks = []
        for position, delta in enumerate(deltas):
            last = position == len(deltas) - 1
            choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            # Log-probabilities go with the first delta that shows text; token ids with the first of their step.
            shows_text = "content" in delta or "reasoning_content" in delta or "tool_calls" in delta
            if body.logprobs and self._unsent[index] and ((shows_text and "role" not in delta) or last):
                entries, self._unsent[index] = self._unsent[index], []
                names = self._generation.names
                choice["logprobs"] = {"content": chat_logprobs(names, entries, body.top_logprobs or 0)}
            if last:
                choice["finish_reason"] = step.finish_reason
            choice["completion_id"] = step.choice.completion_id
            if body.return_token_ids:
                choice["token_ids"] = step.token_ids if position == 0 else []
                choice["sampling_logprobs"] = step.sampling_logprobs if position == 0 else []
            chunks.append(self._chunk([choice], step.choice.adapter, first=step.first and position == 0))
        return chunks

    def usage(self) -> bytes:
        """The chunk of stream_options.include_usage."""
        return self._chunk([], self._generation.choices[0].adapter, counts=self._counts())

    def _counts(self) -> dict[str, Any]:
        return usage(self._generation.choices, choices_per_prompt=self._generation.choices_per_prompt)

    def _chunk(
        self,
        choices: list[dict[str, Any]],
        adapter: str | None,
        *,
        first: bool = False,
        counts: dict[str, Any] | None = None,
    ) -> bytes:
        return event(self._payload(choices, adapter, first=first, counts=counts))

    def _payload(
        self,
        choices: list[dict[str, Any]],
        adapter: str | None,
        *,
        first: bool = False,
        counts: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "id": self._generation.id,
            "object": "chat.completion.chunk",
            "created": self._generation.created,
            "model": self._generation.model,
            "adapter": adapter,
            "choices": choices,
        }
        if self._body.include_usage:
            chunk["usage"] = self._counts() if counts is None and self._body.usage_in_chunks else counts
        if first and self._body.return_token_ids:
            chunk["prompt_token_ids"] = self._generation.specs[0].prompt
        return chunk | _echoes(self._body) if first else chunk


async def _chunks(
    generation: Generation, body: ChatRequest, *, keeper: ChatKeeper | None
) -> AsyncGenerator[bytes, None]:
    writer = _ChunkWriter(generation, body)
    messages = None if keeper is None else [_Message() for _ in generation.choices]
    async with aclosing(generation.steps()) as steps:
        async for step in steps:
            for chunk in writer.write(step):
                yield chunk
            if messages is not None:
                messages[step.choice.index].add(step)
    if keeper is not None and messages is not None:
        await keeper.keep(await _whole(generation, body, messages))
    if body.include_usage:
        yield writer.usage()
    yield DONE


# -- in one piece


class _Message:
    """Collects the deltas of one choice: the same ones that a stream would send."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.arguments: list[list[str]] = []
        self.entries: list[TokenLogprob] = []
        self.token_ids: list[int] = []
        self.sampling_logprobs: list[float] = []
        self.finish_reason: str | None = None

    def add(self, step: Step) -> None:
        """Takes one step."""
        for delta in step.deltas:
            if isinstance(delta, TextDelta):
                (self.reasoning if delta.reasoning else self.content).append(delta.text)
            elif delta.name is not None:
                self.calls.append({"id": delta.call_id, "type": "function", "function": {"name": delta.name}})
                self.arguments.append([delta.arguments])
            else:
                self.arguments[-1].append(delta.arguments)
        self.entries += step.piece.entries
        self.token_ids += step.token_ids
        self.sampling_logprobs += step.sampling_logprobs
        self.finish_reason = step.finish_reason or self.finish_reason

    def message(self) -> dict[str, Any]:
        """The assistant's message."""
        content = "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": None if self.calls and not content else content}
        message["refusal"] = None
        if self.reasoning:
            message["reasoning"] = message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            for call, arguments in zip(self.calls, self.arguments, strict=True):
                call["function"]["arguments"] = "".join(arguments)
            message["tool_calls"] = self.calls
        return message


async def _complete(generation: Generation, body: ChatRequest, *, keeper: ChatKeeper | None) -> Response:
    messages = [_Message() for _ in generation.choices]
    async with aclosing(generation.steps()) as steps:
        async for step in steps:
            messages[step.choice.index].add(step)
    whole = await _whole(generation, body, messages)
    if keeper is not None:
        await keeper.keep(whole)
    adapter = generation.choices[0].adapter
    if body.prompt_logprobs is not None:  # writing those takes a while
        return await asyncio.to_thread(json_response, whole, adapter)
    return json_response(whole, adapter)


async def _whole(generation: Generation, body: ChatRequest, messages: Sequence[_Message]) -> dict[str, Any]:
    """The answer in one piece."""
    choices = []
    for choice, message in zip(generation.choices, messages, strict=True):
        entry: dict[str, Any] = {
            "index": choice.index,
            "message": message.message(),
            "logprobs": None,
            "finish_reason": message.finish_reason,
            "completion_id": choice.completion_id,
            "adapter": choice.adapter,
        }
        if body.logprobs:
            entries = chat_logprobs(generation.names, message.entries, body.top_logprobs or 0)
            entry["logprobs"] = {"content": entries, "refusal": None}
        if body.return_token_ids:
            entry["token_ids"] = message.token_ids
            entry["sampling_logprobs"] = message.sampling_logprobs
        choices.append(entry)
    whole: dict[str, Any] = {
        "id": generation.id,
        "object": "chat.completion",
        "created": generation.created,
        "model": generation.model,
        "adapter": generation.choices[0].adapter,
        "choices": choices,
        "usage": usage(generation.choices, choices_per_prompt=generation.choices_per_prompt),
    }
    if body.return_token_ids:
        whole["prompt_token_ids"] = generation.specs[0].prompt
    whole |= _echoes(body)
    if body.prompt_logprobs is not None:
        scores = generation.prompt_scores(generation.choices[0])
        prompt, vocabulary = generation.specs[0].prompt, generation.served.vocabulary
        # For a long prompt this takes a while.
        whole["prompt_logprobs"] = await asyncio.to_thread(by_token, vocabulary, prompt, scores, body.prompt_logprobs)
    return whole
