"""Prompts: text becomes token ids, off the event loop when it is long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.common.text.output_parser import END_THINK, THINK
from services.common.text.template import RESERVED_KWARGS
from services.gateway.engines.served_model import ServedModel
from services.gateway.protocol.chat_request import ChatRequest
from services.gateway.protocol.completions import CompletionRequest
from services.gateway.settings import GatewaySettings

_TAIL_TOKENS = 16
_MOST_BOUNDARIES = 4096
_RESERVED = RESERVED_KWARGS | {"self"}


def _chars(value: Any) -> int:
    """Characters of all strings in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_chars, value.values()))
    return sum(map(_chars, value)) if isinstance(value, list) else 0


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Refuses what would replace the conversation itself.

    Raises:
        InvalidRequest: a name is taken.
    """
    for name in sorted(_RESERVED & kwargs.keys()):
        raise InvalidRequest(
            f"chat_template_kwargs must not contain {name!r}: it is set by the request itself",
            param=f"chat_template_kwargs.{name}",
        )


async def chat_prompt(served: ServedModel, body: ChatRequest, settings: GatewaySettings) -> list[int]:
    """Tokens of a conversation.

    Raises:
        InvalidRequest: the chat template refuses it.
    """
    turns, tools = body.turns(), body.offered_tools
    check_template_kwargs(body.chat_template_kwargs or {})

    def encode() -> list[int]:
        return served.codec.encode_chat(
            turns,
            tools=tools or None,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            **body.template_kwargs,
        )

    if _chars(turns) + _chars(tools) > settings.offload_chars:
        return await asyncio.to_thread(encode)
    return encode()


async def text_prompts(served: ServedModel, body: CompletionRequest, settings: GatewaySettings) -> list[list[int]]:
    """Tokens of each prompt.

    Raises:
        InvalidRequest: a token id is outside the vocabulary.
    """
    return await encode_texts(served, body.prompts, settings, field="prompt", encode=served.codec.encode)


async def encode_texts(
    served: ServedModel,
    texts: Sequence[str | list[int]],
    settings: GatewaySettings,
    *,
    field: str,
    encode: Callable[[str], list[int]],
) -> list[list[int]]:
    """Tokens of each text; token ids stay as they are.

    Args:
        field: of the request, that a refusal names.
        encode: the tokenizer's.

    Raises:
        InvalidRequest: a token id is outside the vocabulary.
    """
    for position, text in enumerate(texts):
        if not isinstance(text, str) and (largest := max(text)) >= served.info.vocab_size:
            raise InvalidRequest(
                f"{field} {position} contains the token id {largest}, the vocabulary has {served.info.vocab_size}",
                param=field,
            )

    def encode_all() -> list[list[int]]:
        return [encode(text) if isinstance(text, str) else list(text) for text in texts]

    # Of all texts together: a hundred that are short take as long as one that is not.
    if sum(len(text) for text in texts if isinstance(text, str)) > settings.offload_chars:
        return await asyncio.to_thread(encode_all)
    return encode_all()


def opens_thinking(served: ServedModel, prompt: list[int]) -> bool:
    """True if the prompt ends inside an open `<think>`, so that the completion begins there."""
    opening, closing = (served.vocabulary.markup.get(tag) for tag in (THINK, END_THINK))
    if opening is None or closing is None:
        tail = served.vocabulary.text(prompt[-_TAIL_TOKENS:])
        return tail.rfind(THINK) > tail.rfind(END_THINK)
    for token in reversed(prompt):
        if token == opening:
            return True
        # What stands before the present turn does not matter, and a turn begins with a special token.
        if token == closing or token in served.codec.special_ids:
            return False
    return False


def turn_boundaries(served: ServedModel, prompt: list[int]) -> list[int]:
    """Places in a chat's prompt where a turn ends and another begins, ascending: the last ones, if there are too many
    to tell. What clients write contains no control token, so every one of them is the template's."""
    start, place = served.codec.turn_start_id, 0
    found: list[int] = []
    if start is None:
        return found
    try:
        while True:  # by the list's own search: a prompt may have a quarter of a million tokens
            place = prompt.index(start, place + 1)
            found.append(place)
    except ValueError:
        return found[-_MOST_BOUNDARIES:]


def token_budget(
    prompt_tokens: int, wanted: int | None, *, default: int, context: int, field: str, clip: bool = False
) -> int:
    """Most tokens that a completion may have.

    Args:
        prompt_tokens: length of the prompt.
        wanted: what the request asks for; None: ``default``, or less where the context leaves less.
        context: tokens of prompt and completion together.
        field: request field that a refusal names.
        clip: no more than the context leaves, where the request asks for more.

    Raises:
        InvalidRequest: the prompt is empty.
        ContextLengthExceeded: they do not fit.
    """
    if prompt_tokens == 0:
        raise InvalidRequest("the prompt has no tokens", param=field)
    room = context - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens and the model's context is {context}: shorten the prompt",
            param=field,
        )
    if wanted is None:
        return min(default, room)
    if wanted > room and not clip:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {wanted}, together more than the model's context "
            f"of {context}: shorten the prompt or send max_tokens of at most {room}",
            param=field,
        )
    return min(wanted, room)
