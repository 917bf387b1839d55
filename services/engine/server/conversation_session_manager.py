"""ConversationSessionManager: lists, saves, deletes, exports and imports conversation sessions, between two steps of
the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from services.common.errors import InvalidRequest, NotFound, TemperError, Unavailable
from services.engine.kv_cache.keys import Key, Tier
from services.engine.kv_offload.connector import OffloadConnector
from services.engine.kv_offload.conversation_sessions import ConversationSession
from services.engine.kv_offload.entry_format import entry_bytes
from services.engine.kv_offload.manager import TierManager
from services.engine.kv_offload.messages import Entry
from services.engine.loop.loop import EngineLoop
from services.engine.requests.conversation_session import SessionInfo, SessionName
from services.engine.scheduler.scheduler import Scheduler
from services.engine.server.conversation_session_file import Facts, Reader, write

_SECONDS = 30.0
"""Longest wait for the loop to reach a step boundary."""
_PERSIST_SECONDS = 120.0
_MOMENT = 0.005
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Chain:
    """Chain of a session's entries in the tiers."""

    adapter: str
    requests: int
    entries: list[Entry]


class ConversationSessionManager:
    """Manager of conversation sessions, for any thread but the loop's; every method may block.

    Every method raises NotFound if the session does not exist any more, and Unavailable if the engine is stopping.

    Args:
        tiers: offload below the device; None: there is none, and a session is only what the device has.
        durable: whether a tier outlives the process.
        clock: clock of the loop, seconds.
    """

    def __init__(
        self,
        loop: EngineLoop,
        tiers: TierManager | None,
        *,
        durable: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._tiers = tiers
        self._durable = durable
        self._clock = clock

    def list(self, owner: str) -> list[SessionInfo]:
        """Sessions of an owner, last used first."""

        def read(scheduler: Scheduler) -> list[SessionInfo]:
            return [self._history(scheduler, one) for one in scheduler.sessions.of(owner) if one.tip() is not None]

        return self._between_steps(read)

    def get(self, session: SessionName) -> SessionInfo:
        """Description of one session."""
        return self._between_steps(lambda scheduler: self._history(scheduler, _found(scheduler, session)))

    def save(self, session: SessionName) -> SessionInfo:
        """Saves a session to every tier.

        Raises:
            InvalidRequest: there is neither disk nor store (TEMPER_TIERS).
            Unavailable: it could not be written; the message says where and why.
        """
        if not self._durable:
            raise InvalidRequest(
                "this engine has neither disk nor store to save sessions in: set TEMPER_TIERS to host,disk or "
                "host,disk,store",
                param="session",
            )
        self._persist(session)
        return self.get(session)

    def delete(self, session: SessionName) -> None:
        """Deletes a session and, in every tier, the entries that only it uses."""

        def forget(scheduler: Scheduler) -> None:
            _found(scheduler, session)
            scheduler.sessions.forget(session)

        self._between_steps(forget)

    def export(self, session: SessionName) -> Iterator[bytes]:
        """Exports a session as one file, in pieces of at most 1 MiB; raises NotFound before the first piece."""
        tiers = self._with_tiers()
        self._persist(session)
        chain = self._between_steps(lambda scheduler: _chain(scheduler, session))
        if not chain.entries:
            raise NotFound(f"nothing of session {session.name!r} could be saved to the tiers of the engine")
        facts = Facts(
            adapter=chain.adapter,
            requests=chain.requests,
            sizes=[entry_bytes(entry, tiers.layout) for entry in chain.entries],
        )
        # The first entry is read now, so that a missing one is an error and not a file that breaks off.
        first = tiers.export_entry(chain.entries[0].key)
        return write(facts, [first, *(_later(tiers, entry.key) for entry in chain.entries[1:])])

    def import_file(self, session: SessionName, pieces: Iterable[bytes]) -> SessionInfo:
        """Imports a session file; the session is then as it was when it was exported.

        Raises:
            InvalidRequest: it is damaged, or of another model or configuration.
        """
        tiers = self._with_tiers()
        reader = Reader(pieces)
        entries = [tiers.import_entry(item) for item in reader.entries()]
        return self._between_steps(lambda scheduler: self._known(scheduler, session, entries[-1].key, reader.facts))

    def _known(self, scheduler: Scheduler, session: SessionName, key: Key, facts: Facts) -> SessionInfo:
        """Sets the session to the node at which an imported entry ends, once the tiers' events were taken."""
        offload = _tiers_of(scheduler)
        node = offload.node_of(key)
        if node is None:
            raise Unavailable("the session did not stay in the tiers: they are too small for it")
        scheduler.sessions.ended(session, node, facts.adapter)
        known = _found(scheduler, session)
        known.requests = facts.requests
        return self._history(scheduler, known)

    def _persist(self, session: SessionName) -> None:
        """Copies a session's entries to every tier.

        Raises:
            Unavailable: it could not be written.
        """
        done: Future[list[tuple[Key, Tier]]] = Future()

        def begin(scheduler: Scheduler) -> bool:
            tip = _found(scheduler, session).tip()
            if tip is None or tip.pending is not None:
                return False
            offload = _tiers_of(scheduler)
            offload.offer(tip, wanted=True)
            offload.persist(tip, lambda missing: done.set_result(list(missing)))
            return True

        while not self._between_steps(begin):  # a step that computes the end of it is in flight
            time.sleep(_MOMENT)
        try:
            missing = done.result(_PERSIST_SECONDS)
        except TimeoutError:
            raise Unavailable(f"session {session.name!r} was not written in {_PERSIST_SECONDS:g} s") from None
        if missing:
            places = ", ".join(sorted({tier.value for _, tier in missing}))
            raise Unavailable(f"session {session.name!r} could not be written to: {places}; the engine's log says why")

    def _history(self, scheduler: Scheduler, session: ConversationSession) -> SessionInfo:
        tip = session.tip()
        sizes: dict[str, int] = {}
        saved = False
        if tip is not None:
            sizes["device"] = scheduler.device_bytes(tip)
            kept = [] if scheduler.offload is None else scheduler.offload.tiers_of(tip)
            for entry, tiers in kept:
                for tier in tiers:
                    sizes[tier.value] = sizes.get(tier.value, 0) + self._size(entry)
            durable = {Tier.DISK, Tier.STORE}
            saved = bool(kept) and kept[-1][0].end == tip.end and all(durable & tiers for _, tiers in kept)
        since = time.time() - self._clock()
        return SessionInfo(
            session.name,
            0 if tip is None else tip.end,
            session.requests,
            session.adapter,
            session.created + since,
            session.used + since,
            session.expires + since,
            saved,
            {place: size for place, size in sizes.items() if size},
        )

    def _size(self, entry: Entry) -> int:
        return 0 if self._tiers is None else self._tiers.layout.payload_bytes(entry)

    def _with_tiers(self) -> TierManager:
        if self._tiers is None:
            raise InvalidRequest(
                "this engine has no tiers below its device: set TEMPER_TIERS to host or more", param="session"
            )
        return self._tiers

    def _between_steps(self, function: Callable[[Scheduler], _T]) -> _T:
        future = self._loop.call_with_scheduler(function)
        try:
            return future.result(_SECONDS)
        except TimeoutError:
            raise Unavailable(f"the engine did not reach a step boundary within {_SECONDS:g} s") from None


def _found(scheduler: Scheduler, name: SessionName) -> ConversationSession:
    session = scheduler.sessions.get(name)
    if session is None or session.tip() is None:
        raise NotFound(f"there is no session {name.name!r} here, or nothing of it is kept any more")
    return session


def _chain(scheduler: Scheduler, name: SessionName) -> _Chain:
    session = _found(scheduler, name)
    tip = session.tip()
    entries = [] if tip is None else [entry for entry, _ in _tiers_of(scheduler).tiers_of(tip)]
    return _Chain(session.adapter, session.requests, entries)


def _tiers_of(scheduler: Scheduler) -> OffloadConnector:
    if scheduler.offload is None:
        raise TemperError("a session's entries are requested without tiers")
    return scheduler.offload


def _later(tiers: TierManager, key: Key) -> Iterator[bytes]:
    """Reads an entry when its first piece is asked for."""
    yield from tiers.export_entry(key)
