"""Sessions of clients whose histories the prefix cache keeps: what can be asked and done. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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
class History:
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


class HistoryDesk(Protocol):
    """Everything that can be done with sessions. Called from any thread but the loop's; every method may block.

    Raises, each of them: NotFound, there is no such session (any more); Unavailable, the engine is stopping.
    """

    def list(self, owner: str) -> list[History]:
        """Those of an owner, last used first."""
        ...

    def get(self, session: SessionName) -> History: ...

    def save(self, session: SessionName) -> History:
        """Brings it to every tier that there is.

        Raises:
            InvalidRequest: there is neither disk nor store (TEMPER_TIERS).
            Unavailable: it could not be written; the message says where and why.
        """
        ...

    def delete(self, session: SessionName) -> None:
        """Forgets it and, in every tier, what only it has use for."""
        ...

    def export(self, session: SessionName) -> Iterator[bytes]:
        """It as one file, in pieces of at most 1 MiB; NotFound before the first piece."""
        ...

    def take_in(self, session: SessionName, pieces: Iterable[bytes]) -> History:
        """Reads such a file; the session is then as it was when it was exported.

        Raises:
            InvalidRequest: it is damaged, or of another model or configuration.
        """
        ...
