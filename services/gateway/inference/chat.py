"""Chats: a body becomes what is sent to the engines; every API that is a chat underneath goes this way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from services.gateway.inference.canaries import KnownAs
from services.gateway.inference.constraints import chat_constraint, check_chat, thinking_message
from services.gateway.inference.context import InferenceContext
from services.gateway.inference.generation import Generation, PromptSpec
from services.gateway.inference.logprobs import check_size
from services.gateway.inference.prompts import chat_prompt, opens_thinking, token_budget, turn_boundaries
from services.gateway.protocol.chat_request import ChatRequest, Message


async def chat_generation(
    context: InferenceContext,
    body: ChatRequest,
    *,
    prefix: str = "chatcmpl",
    clip: bool = False,
    session: str | None = None,
    traceparent: str = "",
    known_as: KnownAs | None = None,
) -> Generation:
    """Renders and tokenizes a conversation; nothing is sent yet.

    Args:
        context: settings, engines, metrics.
        body: the request.
        prefix: of the response id.
        clip: a token limit that is over what the context leaves is lowered to it, not refused.
        session: the client's session that body or header name.
        traceparent: W3C trace context of the HTTP request.
        known_as: the id that clients know the answer by, where it is another than the generation's.

    Raises:
        InvalidRequest: the request cannot be served as it is.
        ModelNotFound: `model` cannot be served.
        Unavailable: no engine has been reached yet.
    """
    served, settings = context.engines.served, context.settings
    check_chat(body, settings)
    prompt = await chat_prompt(served, body, settings)
    if body.prompt_logprobs is not None:
        limit = settings.max_prompt_logprobs
        check_size(len(prompt), body.prompt_logprobs, limit=limit, field="prompt_logprobs")
    max_tokens = token_budget(
        len(prompt),
        body.token_limit,
        default=settings.default_max_tokens,
        context=served.info.max_model_len,
        field="messages",
        clip=clip,
    )
    opened = opens_thinking(served, prompt)
    constraint = chat_constraint(body, served.vocabulary, settings)
    limits = thinking_message(
        served,
        body,
        settings,
        opened=opened,
        constrained=constraint is not None,
        calls=bool(body.usable_tools),
    )
    return Generation(
        context,
        served,
        body,
        [
            PromptSpec(
                prompt,
                max_tokens,
                tuple(body.offered_tools),
                thinking=opened,
                resumed=bool(body.continue_final_message),
                limits=limits,
                constraint=constraint,
                boundaries=turn_boundaries(served, prompt),
            )
        ],
        prefix=prefix,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        chat=True,
        parallel_tool_calls=body.may_repeat_calls,
        prompt_logprobs=body.prompt_logprobs,
        session=session,
        traceparent=traceparent,
        known_as=known_as,
    )


async def prompt_length(context: InferenceContext, body: ChatRequest) -> int:
    """Tokens of a conversation.

    Raises:
        InvalidRequest: the chat template refuses it.
        Unavailable: no engine has been reached yet.
    """
    return len(await chat_prompt(context.engines.served, body, context.settings))


def parse_chat(form: dict[str, Any]) -> ChatRequest:
    """The chat of a JSON object.

    Raises:
        RequestValidationError: it is not one; answered as if a client had sent it.
    """
    try:
        return ChatRequest.model_validate(form)
    except ValidationError as error:
        found = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()]
        raise RequestValidationError(found, body=form) from error


_ANSWER_SHARE = 4
"""One in so many tokens of the context; so much is kept free for an answer whose length is not limited."""


async def truncated(context: InferenceContext, chat: ChatRequest) -> ChatRequest:
    """The conversation as OpenAI's truncation "auto" cuts it: the oldest messages go, until prompt and answer fit.

    Instructions at the beginning stay, and so do the user's last message and what comes last. A call and its results
    go together.

    Args:
        context: the model, and the answer's default length.
        chat: the whole conversation.
    """
    window = context.engines.served.info.max_model_len
    if await prompt_length(context, chat) + (chat.token_limit or 1) <= window:
        return chat
    answer = chat.token_limit or max(1, min(context.settings.default_max_tokens, window // _ANSWER_SHARE))
    older = _older(chat.messages)
    # The fewest that have to go: each of them less makes a longer prompt.
    fewest, most = 1, len(older)
    while fewest < most:
        tried = (fewest + most) // 2
        if await prompt_length(context, _without(chat, older[:tried])) + answer <= window:
            most = tried
        else:
            fewest = tried + 1
    return _without(chat, older[:most])


def _older(messages: Sequence[Message]) -> list[list[int]]:
    """Groups of messages that may be left out, oldest first: places of messages that belong together."""
    parts: list[list[int]] = []
    for place, message in enumerate(messages):
        if message.role in ("user", "assistant"):
            parts.append([place])
        elif parts:  # results of calls, and later instructions, belong to what is before them
            parts[-1].append(place)
    asked = [place for place, message in enumerate(messages) if message.role == "user"]
    kept = {parts[-1][0], *asked[-1:]} if parts else set()
    return [part for part in parts if part[0] not in kept]


def _without(chat: ChatRequest, parts: Sequence[Sequence[int]]) -> ChatRequest:
    gone = {place for part in parts for place in part}
    messages = [message for place, message in enumerate(chat.messages) if place not in gone]
    return chat.model_copy(update={"messages": messages})
