"""Limits of one request that are settings."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.gateway.protocol.chat.request import ChatRequest
from services.gateway.protocol.fields.sampling import SamplingFields
from services.gateway.settings import GatewaySettings


def check_messages(body: SamplingFields, settings: GatewaySettings) -> None:
    """Before anything is rendered.

    Raises:
        InvalidRequest: a chat has too many messages.
    """
    if isinstance(body, ChatRequest) and len(body.messages) > settings.max_messages:
        raise InvalidRequest(
            f"the chat has {len(body.messages)} messages and the limit is {settings.max_messages}: leave old ones out",
            param="messages",
        )


def check_prompts(lengths: Sequence[int], settings: GatewaySettings) -> None:
    """Before anything is sent to an engine.

    Raises:
        ContextLengthExceeded: a prompt has too many tokens.
    """
    if settings.max_prompt_tokens and max(lengths, default=0) > settings.max_prompt_tokens:
        raise ContextLengthExceeded(
            f"the prompt has {max(lengths)} tokens and the limit of this gateway is {settings.max_prompt_tokens}: "
            "shorten it"
        )
