"""POST /tokenize and /detokenize, GET /tokenizer_info, and the prompts of requests as tokens."""

from __future__ import annotations

import asyncio

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from services.common.errors import InvalidRequest
from services.gateway.api.base.routing import Inference, Routes
from services.gateway.api.base.serving import within
from services.gateway.auth.route_permissions import INFERENCE, Permission
from services.gateway.engines.served_model import ServedModel
from services.gateway.inference.chat import parse_chat
from services.gateway.inference.context import InferenceContext
from services.gateway.inference.engine_request import adapter_ref
from services.gateway.inference.prompts import chat_prompt, text_prompts
from services.gateway.protocol.chat_request import ChatRequest
from services.gateway.protocol.completions import CompletionRequest
from services.gateway.protocol.tokenize import (
    DetokenizeAnswer,
    DetokenizeRequest,
    RenderedPrompt,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
)

routes = Routes("tokenizer")
_CHARS_A_TOKEN = 4
"""Characters of text that a token counts as: decoding it costs about as much as encoding its text."""


@routes.post("/tokenize", Permission(INFERENCE), responses={200: {"model": TokenizeAnswer}})
async def tokenize(request: Request, body: TokenizeRequest, context: Inference) -> Response:
    """The tokens of a text, or of a conversation as a chat completion's prompt has it."""
    chat = None if body.prompt is not None else parse_chat(body.chat_form(context.settings.served_model_name))
    _check_model(context, body.model)
    reservation = context.admission.reserve(1)
    return await within(reservation, request, _tokenized(context, body, chat))


@routes.post("/v1/chat/completions/render", Permission(INFERENCE), responses={200: {"model": RenderedPrompt}})
async def render_chat(request: Request, body: ChatRequest, context: Inference) -> Response:
    """The tokens of the prompt that a chat completion with this body has: llm-d's endpoint picker asks for them."""
    _check_model(context, body.model)
    reservation = context.admission.reserve(1)

    async def rendered() -> Response:
        tokens = await chat_prompt(context.engines.served, body, context.settings)
        return _json(to_json({"token_ids": tokens}))

    return await within(reservation, request, rendered())


@routes.post("/v1/completions/render", Permission(INFERENCE), responses={200: {"model": list[RenderedPrompt]}})
async def render_completion(request: Request, body: CompletionRequest, context: Inference) -> Response:
    """The tokens of each prompt of a completion with this body."""
    _check_model(context, body.model)
    reservation = context.admission.reserve(len(body.prompts))

    async def rendered() -> Response:
        prompts = await text_prompts(context.engines.served, body, context.settings)
        return _json(to_json([{"token_ids": tokens} for tokens in prompts]))

    return await within(reservation, request, rendered())


@routes.post("/detokenize", Permission(INFERENCE), responses={200: {"model": DetokenizeAnswer}})
async def detokenize(request: Request, body: DetokenizeRequest, context: Inference) -> Response:
    """The text of tokens, control tokens included."""
    _check_model(context, body.model)
    reservation = context.admission.reserve(1)
    return await within(reservation, request, _detokenized(context, body.tokens))


@routes.get("/tokenizer_info", Permission(INFERENCE))
async def tokenizer_info(context: Inference) -> TokenizerInfo:
    """The checkpoint's tokenizer_config.json, with its chat template."""
    return TokenizerInfo.model_validate(context.engines.served.codec.config)


def _check_model(context: InferenceContext, model: str | None) -> None:
    if model is not None:
        adapter_ref(model, None, served_model_name=context.settings.served_model_name)


async def _tokenized(context: InferenceContext, body: TokenizeRequest, chat: ChatRequest | None) -> Response:
    served = context.engines.served
    tokens = await (_text(context, served, body) if chat is None else chat_prompt(served, chat, context.settings))

    def answer() -> bytes:
        names = [served.codec.token_name(token) for token in tokens] if body.return_token_strs else None
        context = served.info.max_model_len
        return to_json({"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": names})

    return _json(await asyncio.to_thread(answer) if _many(context, tokens) else answer())


async def _text(context: InferenceContext, served: ServedModel, body: TokenizeRequest) -> list[int]:
    text = body.prompt or ""

    def encode() -> list[int]:
        return served.codec.encode(text, add_special_tokens=bool(body.add_special_tokens))

    return await asyncio.to_thread(encode) if len(text) > context.settings.offload_chars else encode()


async def _detokenized(context: InferenceContext, tokens: list[int]) -> Response:
    served = context.engines.served
    largest = max(tokens, default=0)
    if largest >= served.info.vocab_size:
        raise InvalidRequest(
            f"tokens has the id {largest}, the vocabulary has {served.info.vocab_size} tokens", param="tokens"
        )

    def decode() -> bytes:
        return to_json({"prompt": served.codec.decode(tokens, skip_special=False)})

    return _json(await asyncio.to_thread(decode) if _many(context, tokens) else decode())


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _many(context: InferenceContext, tokens: list[int]) -> bool:
    return len(tokens) * _CHARS_A_TOKEN > context.settings.offload_chars
