"""Sessions: conversations of clients that the prefix cache keeps, by name. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from services.common.errors import InvalidRequest

MAX_NAME = 256
"""Characters of a session's name, and of its owner's."""


class SessionName(NamedTuple):
    """A session of an owner (an API key's; empty where there are no keys)."""

    owner: str
    name: str


def check_session(session: SessionName) -> None:
    """Raises InvalidRequest for a name that no session can have."""
    if not 0 < len(session.name) <= MAX_NAME or len(session.owner) > MAX_NAME:
        raise InvalidRequest(
            f"the name of a session must have 1 to {MAX_NAME} characters and its owner at most as many, they have "
            f"{len(session.name)} and {len(session.owner)}",
            param="session",
        )


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What is kept of a session."""

    session: SessionName
    tokens: int
    """Of the longest history that is kept."""
    requests: int
    """That have ended here."""
    adapter: str
    """"name@n" of the last request; empty for the base."""
    created: float
    """Seconds since 1970."""
    used: float
    expires: float
    """When it is no longer kept before other things."""
    saved: bool
    """Its whole history is on disk or in the store."""
    sizes: Mapping[str, int]
    """Bytes of its history by tier: "device", "host", "disk", "store"."""
