"""POST /v1/embeddings and /v1/score: requests that only read their prompts."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from array import array
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from services.common.errors import InvalidRequest
from services.common.pb import engine_pb2
from services.gateway.api.base.routing import Inference, Routes
from services.gateway.api.base.serving import adapter_header, json_response, within
from services.gateway.auth.route_permissions import INFERENCE, Permission
from services.gateway.engines.served_model import ServedModel
from services.gateway.inference.context import InferenceContext
from services.gateway.inference.engine_request import check_messages
from services.gateway.inference.generation import traceparent_of
from services.gateway.inference.logprobs import check_size
from services.gateway.inference.pooling import Pooling, PoolingOutput, PoolingRequest, reserve
from services.gateway.inference.prompts import chat_prompt, encode_texts, token_budget
from services.gateway.protocol.pooling import EmbeddingsRequest, EmbeddingsResponse, ScoreRequest, ScoreResponse
from services.gateway.settings import GatewaySettings

embedding_routes = Routes("embeddings")

_POOLINGS = {"last": engine_pb2.POOLING_LAST, "mean": engine_pb2.POOLING_MEAN}


@embedding_routes.post(
    "/v1/embeddings",
    Permission(INFERENCE, generates=True),
    batches=EmbeddingsRequest,
    responses={200: {"model": EmbeddingsResponse}},
)
async def create_embeddings(request: Request, body: EmbeddingsRequest, context: Inference) -> Response:
    """Turns texts into vectors."""
    reservation = reserve(context, len(body.inputs), field="input")
    return await within(reservation, request, _embed(request, body, context))


async def _embed(request: Request, body: EmbeddingsRequest, context: InferenceContext) -> Response:
    await context.engine_started()
    served = context.engines.served
    pooled = Pooling(context, body, prefix="embd", traceparent=traceparent_of(request))
    prompts = await encode_texts(served, body.inputs, context.settings, field="input", encode=served.codec.encode)
    for position, prompt in enumerate(prompts):
        where = "input" if len(prompts) == 1 else f"input.{position}"
        token_budget(len(prompt), 1, default=1, context=served.info.max_model_len, field=where)
    pooling = _POOLINGS[body.pooling or "last"]

    def entry(index: int, output: PoolingOutput) -> tuple[str | None, bytes]:
        vector = _shaped(output.embedding, body)
        entry = {
            "object": "embedding",
            "index": index,
            "embedding": _base64(vector) if body.encoding_format == "base64" else vector.tolist(),
            "adapter": output.adapter,
        }
        # Each is encoded when it arrives: thousands of vectors at once would keep everybody else waiting.
        return output.adapter, to_json(entry)

    data = await pooled.read([PoolingRequest(prompt, pooling=pooling) for prompt in prompts], entry)
    adapter = data[0][0]
    head = to_json({"object": "list", "model": body.model, "adapter": adapter, "usage": pooled.usage()})
    whole = b'%b,"data":[%b]}' % (head[:-1], b",".join(encoded for _, encoded in data))
    return Response(whole, headers=adapter_header(adapter), media_type="application/json")


def _shaped(vector: list[float], body: EmbeddingsRequest) -> array[float]:
    """Embedding cut to the wanted dimensions, then scaled to length 1. It is float32, so that both encodings agree.

    Raises:
        InvalidRequest: it has fewer dimensions.
    """
    if body.dimensions is not None:
        if body.dimensions > len(vector):
            raise InvalidRequest(
                f"dimensions is {body.dimensions}, but this model's vectors have {len(vector)}: send at most that",
                param="dimensions",
            )
        vector = vector[: body.dimensions]
    length = math.hypot(*vector)
    if body.normalize is False or not length:
        return array("f", vector)
    return array("f", [number / length for number in vector])


def _base64(vector: array[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


score_routes = Routes("score")


@score_routes.post("/v1/score", Permission(INFERENCE, generates=True), responses={200: {"model": ScoreResponse}})
async def create_scores(request: Request, body: ScoreRequest, context: Inference) -> Response:
    """Says how likely given texts are."""
    reservation = reserve(context, len(body.completions), field="completion")
    return await within(reservation, request, _score(request, body, context))


async def _score(request: Request, body: ScoreRequest, context: InferenceContext) -> Response:
    await context.engine_started()
    served, settings = context.engines.served, context.settings
    pooled = Pooling(context, body, prefix="score", traceparent=traceparent_of(request))
    prompt = await _prompt(served, body, settings)
    encode = served.codec.encode if body.messages is None else served.codec.encode_completion
    completions = await encode_texts(served, body.completions, settings, field="completion", encode=encode)
    for position, tokens in enumerate(completions):
        where = "completion" if len(completions) == 1 else f"completion.{position}"
        if not tokens:
            raise InvalidRequest("the completion has no tokens", param=where)
        if len(prompt) + len(tokens) == 1:
            raise InvalidRequest(
                "a single token with nothing before it has no log-probability: send a prompt", param="prompt"
            )
        token_budget(len(prompt) + len(tokens), 1, default=1, context=served.info.max_model_len, field=where)
    alternatives = body.top_logprobs or 0
    total = sum(map(len, completions))
    check_size(total, alternatives, limit=settings.max_prompt_logprobs, field="completion")

    def entry(index: int, output: PoolingOutput) -> dict[str, Any]:
        return _entry(index, completions[index], output, body, bare=not prompt)

    # All completions have the same prompt: its state may come from the prefix cache.
    parting = [len(prompt)] if prompt else []
    requests = [
        PoolingRequest([*prompt, *tokens], alternatives, len(prompt), boundaries=parting) for tokens in completions
    ]
    data = await pooled.read(requests, entry)
    adapter = data[0]["adapter"]
    whole: dict[str, Any] = {
        "id": pooled.id,
        "object": "list",
        "created": pooled.created,
        "model": body.model,
        "adapter": adapter,
        "data": data,
        "usage": pooled.usage(),
    }
    if body.return_token_ids:
        whole["prompt_token_ids"] = prompt
    return await asyncio.to_thread(json_response, whole, adapter)


async def _prompt(served: ServedModel, body: ScoreRequest, settings: GatewaySettings) -> list[int]:
    chat = body.chat()
    if chat is not None:
        check_messages(chat, settings)
        return await chat_prompt(served, chat, settings)
    if body.prompt is None:
        return []
    (prompt,) = await encode_texts(served, [body.prompt], settings, field="prompt", encode=served.codec.encode)
    return prompt


def _entry(index: int, tokens: list[int], output: PoolingOutput, body: ScoreRequest, *, bare: bool) -> dict[str, Any]:
    """Score of one completion. ``bare``: the first token has nothing before it."""
    scores = output.prompt_logprobs
    missing: list[None] = [None] if bare else []
    entry: dict[str, Any] = {
        "object": "score",
        "index": index,
        "logprob": sum(scores.logprobs),
        "tokens": len(tokens),
        "is_greedy": all(rank == 1 for rank in scores.ranks),
        "token_logprobs": [*missing, *scores.logprobs],
        "ranks": [*missing, *scores.ranks],
        "adapter": output.adapter,
    }
    if body.top_logprobs is not None:
        empty: list[list[Any]] = [[]] if bare else []
        places = range(len(scores.logprobs))
        entry["top_token_ids"] = [*empty, *map(scores.top_ids, places)]
        entry["top_logprobs"] = [*empty, *map(scores.top_logprobs, places)]
    if body.return_token_ids:
        entry["token_ids"] = tokens
    return entry
