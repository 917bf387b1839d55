"""OpenAI's truncation "auto": of a conversation that does not fit, the oldest messages are left out."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.inference.chat import prompt_length
from services.gateway.inference.context import InferenceContext
from services.gateway.protocol.chat.request import ChatRequest, Message

_ANSWER_SHARE = 4
"""One in so many tokens of the context; so much is kept free for an answer whose length is not limited."""


async def truncated(context: InferenceContext, chat: ChatRequest) -> ChatRequest:
    """The conversation without as many of its oldest messages as have to go for prompt and answer to fit.

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
    """What may go, oldest first: the places of messages that belong together."""
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
