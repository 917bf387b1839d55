"""What clients say about caching of prompts. All of it is accepted without effect: the beginning of every prompt is
cached, and found again, by itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.gateway.protocol.fields.base import RequestModel


class CacheControl(RequestModel):
    """Anthropic's mark of the end of what should be cached. Accepted without effect: every beginning is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = Field(None, max_length=64)


class CacheBreakpoint(RequestModel):
    """OpenAI's mark of the same. Accepted without effect."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class CacheOptions(RequestModel):
    """OpenAI's options of the cache. Accepted without effect."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    comparison_response_id: str | None = None
    prewarm: Literal[False] | None = None
    """Only false: every request is answered."""
