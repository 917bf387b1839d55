"""Persists under way: which copies each still waits for."""

from __future__ import annotations

from collections.abc import Callable, Collection

from services.engine.kv_cache.keys import Key, Tier
from services.engine.kv_offload.messages import Event, Persisted


class _Persist:
    def __init__(self, ticket: int, wanted: set[tuple[Key, Tier]]) -> None:
        self.ticket = ticket
        self.wanted = wanted
        self.missing: list[tuple[Key, Tier]] = []


class Persists:
    """Tells Persisted of each. Not thread-safe.

    Args:
        tiers: those that entries are brought to.
    """

    def __init__(self, tiers: Collection[Tier], tell: Callable[[Event], None]) -> None:
        self._tiers = tiers
        self._tell = tell
        self._open: list[_Persist] = []

    def begin(self, ticket: int, wanted: Collection[tuple[Key, Tier]], missing: Collection[tuple[Key, Tier]]) -> None:
        """One that waits for these copies; others are known to be missing."""
        persist = _Persist(ticket, set(wanted))
        persist.missing.extend(missing)
        self._open.append(persist)
        self._end_those_done()

    def kept(self, key: Key, tier: Tier) -> None:
        """The copy is there."""
        self._settle(key, tier, missing=False)

    def failed(self, key: Key, tier: Tier) -> None:
        """It could not be made."""
        self._settle(key, tier, missing=True)

    def gone(self, key: Key) -> None:
        """The entry is no more."""
        for tier in self._tiers:
            self._settle(key, tier, missing=True)

    def _settle(self, key: Key, tier: Tier, *, missing: bool) -> None:
        for persist in self._open:
            if (key, tier) in persist.wanted:
                persist.wanted.discard((key, tier))
                if missing:
                    persist.missing.append((key, tier))
        self._end_those_done()

    def _end_those_done(self) -> None:
        for persist in [persist for persist in self._open if not persist.wanted]:
            self._open.remove(persist)
            self._tell(Persisted(persist.ticket, tuple(persist.missing)))
