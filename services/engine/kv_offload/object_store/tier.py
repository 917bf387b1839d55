"""The store: entries as objects that all engines of a fleet share."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from services.common.storage.object_store import ListedObject
from services.engine.kv_cache.keys import Key, Tier
from services.engine.kv_offload.copies.background import ERASE_RANK, LowerTier
from services.engine.kv_offload.copies.fetcher import Fetcher
from services.engine.kv_offload.copies.index import Index
from services.engine.kv_offload.copies.records import Buffer, Record
from services.engine.kv_offload.failures import CopyFailed, FailureLog
from services.engine.kv_offload.messages import Entry
from services.engine.kv_offload.object_store.objects import MOST_BYTES, StoreObjects
from services.engine.kv_offload.worker import Worker
from services.engine.observability.events import CopyEvicted, EventStream

_REMEMBERED = 10_000
"""Forgotten keys, so that what others have put behind them is removed as well."""


@dataclass(frozen=True, slots=True)
class _Stranger:
    """An object whose predecessor is not known here."""

    entry: Entry
    size: int
    modified: float


class StoreTier(LowerTier):
    """What others put there is found by listing it now and then.

    The limit is for the fleet: whoever finds more removes the leaves that are worth least to itself.

    Args:
        poll_seconds: between two listings.
        after_uses: hits after which an entry is put there; 0: all are.
    """

    def __init__(
        self,
        index: Index,
        objects: StoreObjects,
        fetcher: Fetcher,
        events: EventStream,
        failures: FailureLog,
        failed: Callable[[Key, Tier], None],
        *,
        poll_seconds: float,
        after_uses: int,
    ) -> None:
        super().__init__(Tier.STORE, index, objects, fetcher, events, failures, failed)
        self._objects = objects
        self._poll_seconds = poll_seconds
        self._after_uses = after_uses
        self._strangers: dict[Key, _Stranger] = {}
        self._behind: dict[Key, set[Key]] = {}
        """The strangers that wait for an entry."""
        self._forgotten: OrderedDict[Key, None] = OrderedDict()
        self._coming: deque[Entry] = deque()
        """Entries that have got their first copy, while those behind one of them are looked for."""
        self._greeting = False
        self.poller = Worker("tiers-store-poll")
        self.poller.put(self._poll)
        index.known.append(self._greet)

    @property
    def size(self) -> int:
        return super().size + sum(stranger.size for stranger in self._strangers.values())

    def consider(self, record: Record, buffer: Buffer | None = None) -> None:
        """Puts an entry there if it was used enough; the caller holds the index's lock."""
        # To have been made counts as a use.
        if not self._after_uses or record.uses > self._after_uses:
            self.want(record, buffer=buffer)

    def forget(self, keys: Collection[Key]) -> None:
        """Removes entries whether or not they are known here; the caller holds the index's lock."""
        for key in keys:
            self._forgotten[key] = None
            self._forgotten.move_to_end(key)
            self.erase(key)
        while len(self._forgotten) > _REMEMBERED:
            self._forgotten.popitem(last=False)

    def _make_room(self, record: Record, size: int) -> None:
        if size > MOST_BYTES:
            raise CopyFailed("full", f"an entry of {size:,} bytes, where an object has {MOST_BYTES:,} at most")
        with self._index.lock:
            self._forgotten.pop(record.entry.key, None)
        super()._make_room(record, size)

    def _evict(self, record: Record | None) -> bool:
        if self._strangers:
            key = min(self._strangers, key=lambda key: self._strangers[key].modified)
            self._events.emit(CopyEvicted(Tier.STORE, self._strangers[key].size))
            self._leave(key)
            self.erase(key)
            return True
        return self._index.evict(Tier.STORE, None if record is None else record.entry.parent)

    def _erase(self) -> None:
        if self._doomed:
            super()._erase()
            if self._doomed:
                self.worker.put(self._erase, rank=ERASE_RANK, at=time.monotonic() + self._objects.pause + 1.0)

    def _poll(self) -> None:
        try:
            with self._index.lock:
                before = set(self._index.books[Tier.STORE].sizes) | set(self._strangers)
            listed = self._objects.listing()
            self._compare(listed, before)
        except CopyFailed as error:
            self._failures.tell(Tier.STORE, error.reason, str(error))
        finally:
            pause = max(self._poll_seconds, self._objects.pause)
            self.poller.put(self._poll, at=time.monotonic() + pause)

    def _compare(self, listed: Mapping[Key, ListedObject], before: Collection[Key]) -> None:
        """Tells what has come and what has gone.

        Args:
            before: the objects that were known when the listing began.
        """
        with self._index.lock:
            for key in before - listed.keys():
                record = self._index.find(key)
                if record is not None:
                    self._index.drop(record, Tier.STORE, erase=False)
                self._leave(key)
            known = self._index.books[Tier.STORE].sizes.keys() | self._strangers.keys() | self._doomed.keys()
            new = {key: found for key, found in listed.items() if key not in known}
        entries = []
        for key, header in self._objects.headers(new):
            if isinstance(header, CopyFailed):
                if header.reason != "missing":  # which it may be by now
                    self._failures.tell(Tier.STORE, header.reason, str(header))
                if header.reason == "damaged":
                    with self._index.lock:
                        self.erase(key)
            else:
                entries.append(header.entry)
        for entry in sorted(entries, key=lambda entry: entry.start):
            with self._index.lock:
                self._meet(entry, new[entry.key])
        with self._index.lock:
            limit = self._index.books[Tier.STORE].limit
            while self.size > limit and self._evict(None):
                pass

    def _meet(self, entry: Entry, listed: ListedObject) -> None:
        """An object that was not known."""
        if entry.key in self._forgotten or entry.parent in self._forgotten:
            self.forget([entry.key])
        elif not self._know(entry, listed.size) and entry.parent is not None:
            self._strangers[entry.key] = _Stranger(entry, listed.size, listed.modified.timestamp())
            self._behind.setdefault(entry.parent, set()).add(entry.key)

    def _know(self, entry: Entry, size: int) -> bool:
        """False: its predecessor is not known."""
        parent = None if entry.parent is None else self._index.find(entry.parent)
        if entry.parent is not None and (parent is None or not parent.tiers):
            return False
        record = self._index.expect(entry)
        if record is None:
            return False
        record.uses = max(1, record.uses)
        self._index.keep(record, Tier.STORE, size)
        self._index.unclaim(record)
        return True

    def _greet(self, record: Record) -> None:
        """An entry has got its first copy: those behind it are strangers no longer."""
        self._coming.append(record.entry)
        if self._greeting:  # no recursion: a chain may be long
            return
        self._greeting = True
        try:
            while self._coming:
                for key in list(self._behind.get(self._coming.popleft().key, ())):
                    stranger = self._strangers[key]
                    self._leave(key)
                    self._know(stranger.entry, stranger.size)
        finally:
            self._greeting = False

    def _leave(self, key: Key) -> None:
        """No stranger any more."""
        stranger = self._strangers.pop(key, None)
        if stranger is None or stranger.entry.parent is None:
            return
        waiting = self._behind[stranger.entry.parent]
        waiting.discard(key)
        if not waiting:
            del self._behind[stranger.entry.parent]
