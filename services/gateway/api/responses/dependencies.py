"""Resources of /v1/responses, /v1/conversations and stored chats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from services.gateway.api.base.dependencies import provided
from services.gateway.api.responses.background import BackgroundResponses
from services.gateway.api.responses.store.best_effort import Shelf
from services.gateway.api.responses.store.documents import DocumentStore
from services.gateway.api.responses.store.store import ResponseStore


@dataclass(frozen=True, slots=True)
class ResponseServices:
    """Stores of what is kept of answers, and the responses that run in the background."""

    responses: ResponseStore
    documents: DocumentStore
    """Stored chats and conversations."""
    best_effort: Shelf
    background: BackgroundResponses


Responses = Annotated[ResponseServices, provided(ResponseServices)]
