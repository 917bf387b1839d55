"""A desk of sessions in memory, each one byte string."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from services.common.errors import InvalidRequest, NotFound
from services.engine.requests.conversation_session import SessionInfo, SessionName

PIECE = 2**16
MAGIC = b"history"


@dataclass
class MemorySessions:
    """services.engine.requests.conversation_session.HistoryDesk."""

    kept: dict[SessionName, tuple[SessionInfo, bytes]] = field(default_factory=dict)
    can_save: bool = True
    handed: int = 0
    """Pieces of exports that were asked for."""
    taken: int = 0
    """Pieces of imports that were read."""
    open: int = 0
    """Exports and imports under way."""
    go_on: threading.Event = field(default_factory=threading.Event)
    """Cleared: imports wait between two pieces."""
    threads: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.go_on.set()

    def keep(self, owner: str, name: str, data: bytes = b"", *, used: float = 0.0) -> SessionInfo:
        session = SessionName(owner, name)
        history = SessionInfo(session, len(data), 1, "bot@2", 1.5, used, used + 60, False, {"device": len(data)})
        self.kept[session] = history, data
        return history

    def list(self, owner: str) -> list[SessionInfo]:
        self._seen()
        found = [history for history, _ in self.kept.values() if history.session.owner == owner]
        return sorted(found, key=lambda history: -history.used)

    def get(self, session: SessionName) -> SessionInfo:
        self._seen()
        if session not in self.kept:
            raise NotFound(f"no such session: {session.name!r}", param="session")
        return self.kept[session][0]

    def save(self, session: SessionName) -> SessionInfo:
        history = self.get(session)
        if not self.can_save:
            raise InvalidRequest("there is neither disk nor store (TEMPER_TIERS)")
        history = replace(history, saved=True)
        self.kept[session] = history, self.kept[session][1]
        return history

    def delete(self, session: SessionName) -> None:
        self.get(session)
        del self.kept[session]

    def export(self, session: SessionName) -> Iterator[bytes]:
        self._seen()
        if session.name == "bug":
            raise KeyError("secret path")
        data = MAGIC + self.kept[session][1] if session in self.kept else None
        if data is None:
            raise NotFound(f"no such session: {session.name!r}", param="session")
        self.open += 1
        try:
            for start in range(0, len(data), PIECE):
                self.handed += 1
                yield data[start : start + PIECE]
        finally:
            self.open -= 1

    def import_file(self, session: SessionName, pieces: Iterable[bytes]) -> SessionInfo:
        self._seen()
        self.open += 1
        try:
            read: list[bytes] = []
            for piece in pieces:
                self.taken += 1
                read.append(piece)
                if not read[0].startswith(MAGIC):
                    raise InvalidRequest("this is not an exported session")
                self.go_on.wait()
        finally:
            self.open -= 1
        return self.keep(*session, b"".join(read).removeprefix(MAGIC), used=time.time())

    def _seen(self) -> None:
        self.threads.add(threading.current_thread().name)
