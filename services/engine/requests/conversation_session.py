"""Conversation sessions: names and descriptions of cached conversations. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from services.common.errors import InvalidRequest

MAX_NAME = 256
"""Longest name of a session and of its owner, characters."""


class SessionName(NamedTuple):
    """Name of a conversation session, with its owner (id of the API key; empty if there are no keys)."""

    owner: str
    name: str


def check_session(session: SessionName) -> None:
    """Raises InvalidRequest if no session can have this name."""
    if not 0 < len(session.name) <= MAX_NAME or len(session.owner) > MAX_NAME:
        raise InvalidRequest(
            f"the name of a session must have 1 to {MAX_NAME} characters and its owner at most as many, they have "
            f"{len(session.name)} and {len(session.owner)}",
            param="session",
        )


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """Description of a conversation session and what is cached of it."""

    session: SessionName
    tokens: int
    """Tokens of the longest cached conversation."""
    requests: int
    """Number of requests that have ended here."""
    adapter: str
    """Adapter version "name@n" of the last request; empty for the base."""
    created: float
    """Time of the first request, seconds since 1970."""
    used: float
    expires: float
    """End of its pin in the cache."""
    saved: bool
    """True if the whole conversation is on disk or in the store."""
    sizes: Mapping[str, int]
    """Bytes of the cached conversation by tier: "device", "host", "disk", "store"."""
