"""/v1/sessions."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from fastapi import Path
from pydantic import BaseModel, ConfigDict

from services.common.pb import histories_pb2

_FASTEST_FIRST = "device host disk store"
SessionPath: TypeAlias = Annotated[
    str,
    Path(
        min_length=1,
        max_length=256,
        description="As requests say it: `session_id`, `prompt_cache_key` or `user`. Slashes may stand as they are.",
    ),
]


class SessionObject(BaseModel):
    """What an engine keeps of a session."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["session"] = "session"
    tokens: int
    """Tokens of the longest history that is kept."""
    requests: int
    """Requests that have ended there."""
    adapter: str | None
    """Adapter of the last request; null: the model without adapter."""
    created_at: int
    """Seconds since 1970."""
    used_at: int
    expires_at: int
    """When it is no longer kept before other things."""
    saved: bool
    """Whether the whole history is on disk or in the object store."""
    bytes: dict[str, int]
    """Bytes of its history, by tier: "device", "host", "disk", "store"."""
    engine: str
    """Engine that keeps the session, as `usage.session` names it."""

    @classmethod
    def of(cls, history: histories_pb2.History, engine: str) -> SessionObject:
        """Session object of a session that an engine keeps."""
        return cls(
            id=history.session.name,
            tokens=history.tokens,
            requests=history.requests,
            adapter=history.adapter or None,
            created_at=history.created_unix_ms // 1000,
            used_at=history.used_unix_ms // 1000,
            expires_at=history.expires_unix_ms // 1000,
            saved=history.saved,
            bytes=dict(sorted(history.bytes.items(), key=lambda item: _FASTEST_FIRST.find(item[0]))),
            engine=engine,
        )


class SessionList(BaseModel):
    """A page of sessions."""

    object: Literal["list"] = "list"
    data: list[SessionObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedSession(BaseModel):
    """What DELETE answers."""

    id: str
    object: Literal["session"] = "session"
    deleted: Literal[True] = True
