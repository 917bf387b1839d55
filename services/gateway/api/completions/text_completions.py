"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from services.gateway.api.base.openapi import answers_with
from services.gateway.api.base.routing import Routes, resource_of
from services.gateway.api.base.serving import SESSION_HEADER, answer, json_response
from services.gateway.auth.route_permissions import INFERENCE, Permission
from services.gateway.core.sse import DONE, ChunkTemplate, event
from services.gateway.inference.choice import Choice, Step, usage
from services.gateway.inference.constraints import check_constraint, constraint_of
from services.gateway.inference.context import InferenceContext
from services.gateway.inference.generation import Generation, PromptSpec, reserve, traceparent_of
from services.gateway.inference.logprobs import NO_ECHO, Echo, by_token, check_size, echo, joined, text_logprobs
from services.gateway.inference.prompts import text_prompts, token_budget
from services.gateway.protocol.completions import CompletionRequest, CompletionResponse
from services.gateway.text.detokenizer import Piece

routes = Routes("completions")


@routes.post(
    "/v1/completions",
    Permission(INFERENCE, generates=True),
    batches=CompletionRequest,
    responses=answers_with(CompletionResponse, stream=CompletionResponse, done=True),
    openapi_extra=SESSION_HEADER,
)
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continues text or tokens."""
    context = resource_of(request, InferenceContext)
    reservation = reserve(context, body, prompts=len(body.prompts))
    return await answer(request, body, context, reservation, prepare=_prepare, chunks=_chunks, complete=_complete)


async def _prepare(
    request: Request, body: CompletionRequest, context: InferenceContext, session: str | None
) -> Generation:
    served = context.engines.served
    check_constraint(body, context.settings)
    prompts = await text_prompts(served, body, context.settings)
    constraint = None if body.wanted is None else constraint_of(body.wanted)
    default = 16  # OpenAI's default for this route
    specs = [
        PromptSpec(
            prompt,
            token_budget(
                len(prompt), body.max_tokens, default=default, context=served.info.max_model_len, field="prompt"
            ),
            constraint=constraint,
        )
        for prompt in prompts
    ]
    wanted = None
    if body.tells_prompt:
        # Both fields ask for log-probabilities of the prompt: the engine gives as many as the larger one says.
        wanted = max(body.prompt_logprobs or 0, (body.logprobs or 0) if body.echo else 0)
        check_size(
            body.choices * sum(map(len, prompts)),
            wanted,
            limit=context.settings.max_prompt_logprobs,
            field="logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
        )
    return Generation(
        context,
        served,
        body,
        specs,
        prefix="cmpl",
        top_logprobs=body.logprobs,
        chat=False,
        prompt_logprobs=wanted,
        shows_end=bool(body.echo or body.return_token_ids),
        session=session,
        traceparent=traceparent_of(request),
    )


class _Writer:
    """Makes choices and bodies of one response."""

    def __init__(self, generation: Generation, body: CompletionRequest) -> None:
        self._generation = generation
        self._body = body
        self._templates: dict[int, ChunkTemplate] = {}
        self._echoes: dict[int, Echo] = {}

    def prompt_of(self, choice: Choice) -> list[int]:
        """Tokens of a choice's prompt."""
        return self._generation.specs[choice.index // self._generation.choices_per_prompt].prompt

    def echo(self, choice: Choice) -> Echo:
        """Prompt of a choice, as it stands before the text; empty unless the request has `echo`."""
        if not self._body.echo:
            return NO_ECHO
        number = choice.index // self._generation.choices_per_prompt
        if number not in self._echoes:
            top, scores = self._body.logprobs, self._generation.prompt_scores(choice)
            names, prompt = self._generation.names, self.prompt_of(choice)
            self._echoes[number] = echo(names, prompt, None if top is None else scores, top or 0)
        return self._echoes[number]

    def choice(
        self,
        choice: Choice,
        piece: Piece,
        token_ids: list[int],
        sampling_logprobs: list[float],
        finish_reason: str | None,
        *,
        with_prompt: bool,
    ) -> dict[str, Any]:
        """One entry of `choices`."""
        body, before = self._body, self.echo(choice)
        entry: dict[str, Any] = {
            "index": choice.index,
            "text": (before.text if with_prompt else "") + piece.text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "completion_id": choice.completion_id,
            "adapter": choice.adapter,
        }
        if body.logprobs is not None:
            piece.offsets = [len(before.text) + offset for offset in piece.offsets]
            itself = bool(body.return_tokens_as_token_ids)
            told = text_logprobs(self._generation.names, piece, body.logprobs, itself=itself)
            entry["logprobs"] = joined(before.logprobs, told) if with_prompt else told
        if body.prompt_logprobs is not None:
            scores = self._generation.prompt_scores(choice)
            vocabulary, prompt = self._generation.served.vocabulary, self.prompt_of(choice)
            entry["prompt_logprobs"] = by_token(vocabulary, prompt, scores, body.prompt_logprobs)
        if body.return_token_ids:
            if with_prompt:
                entry["prompt_token_ids"] = self.prompt_of(choice)
            entry["token_ids"] = token_ids
            entry["sampling_logprobs"] = sampling_logprobs
        return entry

    def body(self, choices: list[dict[str, Any]], adapter: str | None, *, with_prompt: bool = True) -> dict[str, Any]:
        """A response or a chunk, without usage."""
        whole: dict[str, Any] = {
            "id": self._generation.id,
            "object": "text_completion",
            "created": self._generation.created,
            "model": self._generation.model,
            "adapter": adapter,
            "choices": choices,
        }
        if with_prompt and self._body.return_token_ids and len(self._generation.specs) == 1:
            whole["prompt_token_ids"] = self._generation.specs[0].prompt
        return whole

    def event(self, step: Step) -> bytes:
        """The chunk of one step. Chunks between a choice's first and last are filled into a template."""
        body = self._body
        tokens = (step.token_ids, step.sampling_logprobs)
        if step.first or step.finish_reason is not None or body.logprobs is not None or body.usage_in_chunks:
            return event(self._chunk(step, step.piece, *tokens))
        values = (step.piece.text, *tokens) if body.return_token_ids else (step.piece.text,)
        template = self._templates.get(step.choice.index)
        if template is None:

            def write(text: str, token_ids: Any = (), sampling_logprobs: Any = ()) -> bytes:
                return event(self._chunk(step, Piece(text), token_ids, sampling_logprobs))

            template = ChunkTemplate(write, len(values))
            self._templates[step.choice.index] = template
        return template.fill(*values)

    def _chunk(self, step: Step, piece: Piece, token_ids: Any, sampling_logprobs: Any) -> dict[str, Any]:
        entry = self.choice(
            step.choice, piece, token_ids, sampling_logprobs, step.finish_reason, with_prompt=step.first
        )
        chunk = self.body([entry], step.choice.adapter, with_prompt=step.first)
        if self._body.include_usage:
            chunk["usage"] = self.usage() if self._body.usage_in_chunks else None
        return chunk

    def usage(self) -> dict[str, Any]:
        """Token counts."""
        return usage(self._generation.choices, choices_per_prompt=self._generation.choices_per_prompt)


async def _chunks(generation: Generation, body: CompletionRequest) -> AsyncGenerator[bytes, None]:
    writer = _Writer(generation, body)
    async with aclosing(generation.steps()) as steps:
        async for step in steps:
            shows = step.piece.text or step.finish_reason or step.first or (body.return_token_ids and step.token_ids)
            if not shows:
                continue
            if step.first and body.echo and body.logprobs is not None:
                yield await asyncio.to_thread(writer.event, step)  # for a long prompt this takes a while
            else:
                yield writer.event(step)
    if body.include_usage:
        yield event({**writer.body([], generation.choices[0].adapter, with_prompt=False), "usage": writer.usage()})
    yield DONE


async def _complete(generation: Generation, body: CompletionRequest) -> Response:
    writer = _Writer(generation, body)
    collected: list[list[Step]] = [[] for _ in generation.choices]
    async with aclosing(generation.steps()) as steps:
        async for step in steps:
            collected[step.choice.index].append(step)
    if body.tells_prompt:
        return await asyncio.to_thread(_whole, writer, generation, collected)
    return _whole(writer, generation, collected)


def _whole(writer: _Writer, generation: Generation, collected: list[list[Step]]) -> Response:
    entries = []
    for choice, steps_of_choice in zip(generation.choices, collected, strict=True):
        piece = Piece(
            "".join(step.piece.text for step in steps_of_choice),
            [entry for step in steps_of_choice for entry in step.piece.entries],
            [offset for step in steps_of_choice for offset in step.piece.offsets],
        )
        entries.append(
            writer.choice(
                choice,
                piece,
                [token for step in steps_of_choice for token in step.token_ids],
                [logprob for step in steps_of_choice for logprob in step.sampling_logprobs],
                steps_of_choice[-1].finish_reason if steps_of_choice else None,
                with_prompt=True,
            )
        )
    adapter = generation.choices[0].adapter
    return json_response({**writer.body(entries, adapter), "usage": writer.usage()}, adapter)
