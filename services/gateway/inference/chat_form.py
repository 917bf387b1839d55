"""Requests of other APIs become chats: by the form that a client of the chat would send."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from services.gateway.protocol.chat.request import ChatRequest


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
