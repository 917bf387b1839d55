"""Pooling: prompts that engines read without an answer, for log-probabilities of their tokens or for embeddings."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from services.common.errors import InvalidRequest, ModelNotFound, Unavailable
from services.common.pb import engine_pb2
from services.gateway.auth.caller import seconds_left
from services.gateway.core.admission import Reservation
from services.gateway.inference.context import InferenceContext
from services.gateway.inference.engine_request import cache_salt, check_prompts, field_of_policy, policy_ref
from services.gateway.inference.logprobs import PromptLogprobs, check_complete
from services.gateway.protocol.pooling import ReadingFields

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """Request to read one prompt, and what is to be told of it."""

    prompt: list[int]
    alternatives: int | None = None
    """Number of alternatives beside each token's log-probability; None: no log-probability is asked for."""
    first: int = 0
    """First token whose log-probability is asked for."""
    pooling: engine_pb2.Pooling.ValueType = engine_pb2.POOLING_UNSPECIFIED
    boundaries: Sequence[int] = ()
    """Places in the prompt where similar prompts may begin to differ from it."""


@dataclass(slots=True)
class PoolingOutput:
    """Output of one PoolingRequest, as an engine's updates bring it."""

    adapter: str | None = None
    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs = field(default_factory=PromptLogprobs)
    embedding: list[float] = field(default_factory=list)

    def add(self, update: engine_pb2.Update) -> None:
        """Takes the next update."""
        self.adapter = update.adapter or self.adapter
        self.cached_tokens = update.cached_tokens or self.cached_tokens
        if update.HasField("prompt_logprobs"):
            self.prompt_logprobs.add(update.prompt_logprobs)
        self.embedding += update.embedding


class Pooling:
    """Pooling requests of one HTTP request.

    Args:
        context: settings, engines, metrics.
        body: which adapter reads, and how urgently.
        prefix: of the response id.
        traceparent: W3C trace context, checked.

    Raises:
        ModelNotFound: `model` cannot be served.
        InvalidRequest: `adapter` is malformed.
    """

    def __init__(self, context: InferenceContext, body: ReadingFields, *, prefix: str, traceparent: str = "") -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        structlog.contextvars.bind_contextvars(completion_id=self.id)  # engines know the request by it
        self.created = int(time.time())
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._context = context
        self._body = body
        self._traceparent = traceparent
        self._adapter = policy_ref(body, served_model_name=context.settings.served_model_name)
        self._salt = cache_salt(context.settings.cache_scope, body.cache_salt)
        self._deadline = int((time.time() + seconds_left(context.settings.request_timeout_seconds)) * 1000)

    async def read(self, requests: Sequence[PoolingRequest], take: Callable[[int, PoolingOutput], T]) -> list[T]:
        """Results of ``take`` on each output, in the order of the requests; as many as the HTTP request has places for
        are read at a time.

        Raises:
            ContextLengthExceeded: a prompt is longer than this gateway takes.
            TemperError: what an engine answered instead, or that it is gone. Then nothing more is read.
        """
        check_prompts([len(request.prompt) for request in requests], self._context.settings)
        made: dict[int, T] = {}

        async def one(index: int) -> None:
            output = await self._read(index, requests[index])
            self.prompt_tokens += len(requests[index].prompt)
            self.cached_tokens += output.cached_tokens
            made[index] = take(index, output)

        try:
            await _each(len(requests), places(self._context, len(requests)), one)
        except ModelNotFound as error:
            # The engine does not know where the name stood.
            error.param = field_of_policy(self._body)
            raise
        self._context.count_tokens("prompt", self.prompt_tokens)
        self._context.count_tokens("cached", self.cached_tokens)
        return [made[index] for index in range(len(requests))]

    def usage(self) -> dict[str, object]:
        """Token counts, once all is read."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    async def _read(self, index: int, pooling: PoolingRequest) -> PoolingOutput:
        request = engine_pb2.GenerateRequest(
            request_id=f"{self.id}:{index}",
            prompt_token_ids=pooling.prompt,
            # An engine ends a request with a token, which nobody looks at.
            sampling=engine_pb2.SamplingParams(temperature=0.0, max_tokens=1),
            adapter=self._adapter,
            deadline_unix_ms=self._deadline,
            traceparent=self._traceparent,
            cache_salt=self._salt,
            priority=self._body.priority or 0,
            prompt_logprobs=pooling.alternatives,
            prompt_logprobs_from=pooling.first,
            pooling=pooling.pooling,
            boundaries=pooling.boundaries,
        )
        output = PoolingOutput()
        async with self._context.engines.request_group([request]) as group:
            async for _, update in group:
                output.add(update)
        if pooling.alternatives is not None:
            check_complete(output.prompt_logprobs, len(pooling.prompt) - max(1, pooling.first))
        if pooling.pooling and not output.embedding:
            raise Unavailable("the engine told no vector of the prompt")
        return output


def places(context: InferenceContext, prompts: int) -> int:
    """Number of prompts of a request that are read at a time."""
    return min(prompts, context.settings.max_choices)


def reserve(context: InferenceContext, prompts: int, *, field: str) -> Reservation:
    """Takes places in the context, before anything is tokenized.

    Args:
        field: of the request, that has the prompts.

    Raises:
        InvalidRequest: more prompts than one request may have.
        Overloaded: no room now.
    """
    limit = context.settings.max_inputs
    if prompts > limit:
        raise InvalidRequest(
            f"{field} has {prompts} texts and a request may have {limit}: send several requests", param=field
        )
    return context.admission.reserve(places(context, prompts))


async def _each(count: int, width: int, work: Callable[[int], Awaitable[None]]) -> None:
    """Calls ``work`` with each number below ``count``, ``width`` at a time; the first failure ends all."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await work(number)

    workers = [asyncio.ensure_future(worker()) for _ in range(width)]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
