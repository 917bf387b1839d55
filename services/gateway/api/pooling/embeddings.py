"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import math
import struct
from array import array

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from services.common.errors import InvalidRequest
from services.common.pb import engine_pb2
from services.gateway.api.base.dependencies import Inference
from services.gateway.api.base.routing import Routes
from services.gateway.api.base.serving import adapter_header, within
from services.gateway.auth.route_permissions import INFERENCE, Permission
from services.gateway.inference.context import InferenceContext
from services.gateway.inference.generation import traceparent_of
from services.gateway.inference.pooling import Pooling, PoolingOutput, PoolingRequest, reserve
from services.gateway.inference.prompts import encode_texts, token_budget
from services.gateway.protocol.pooling import EmbeddingsRequest, EmbeddingsResponse

routes = Routes("embeddings")

_POOLINGS = {"last": engine_pb2.POOLING_LAST, "mean": engine_pb2.POOLING_MEAN}


@routes.post(
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
        # Now, one by one: thousands of vectors together would keep everybody else waiting.
        return output.adapter, to_json(entry)

    data = await pooled.read([PoolingRequest(prompt, pooling=pooling) for prompt in prompts], entry)
    adapter = data[0][0]
    head = to_json({"object": "list", "model": body.model, "adapter": adapter, "usage": pooled.usage()})
    whole = b'%b,"data":[%b]}' % (head[:-1], b",".join(encoded for _, encoded in data))
    return Response(whole, headers=adapter_header(adapter), media_type="application/json")


def _shaped(vector: list[float], body: EmbeddingsRequest) -> array[float]:
    """Cut to the wanted dimensions, then of length 1; float32, so that both encodings say the same.

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
