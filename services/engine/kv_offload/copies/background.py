"""What the tiers below the host have in common: copies are made and removed in the background, in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from services.engine.kv_cache.keys import Key, Tier
from services.engine.kv_offload.copies.fetcher import Fetcher
from services.engine.kv_offload.copies.index import Index
from services.engine.kv_offload.copies.records import Buffer, Record
from services.engine.kv_offload.entry_format.header import Header
from services.engine.kv_offload.failures import CopyFailed, FailureLog
from services.engine.kv_offload.messages import Bytes
from services.engine.kv_offload.worker import Worker
from services.engine.observability.events import CopySaved, EventStream

FIRST_RANK, ERASE_RANK, FORCED_RANK, WRITE_RANK, TOUCH_RANK = range(5)
_MOST_WAITING = 1024
"""Copies that wait to be made although nobody asked for them; further ones are not."""
_FETCH_SECONDS = 60.0
"""How long bytes may take that a Persist needs from another tier."""


class Target(Protocol):
    """Where copies are made. Every method may raise CopyFailed."""

    def write(self, header: Header, payload: Sequence[Bytes]) -> None: ...

    def remove(self, key: Key) -> None: ...


class LowerTier:
    """Copies of one tier. An entry comes after the one that it stands on, and leaves before. Thread-safe.

    Args:
        failed: told, under the index's lock, that a copy which was asked for is not going to be there.
    """

    def __init__(
        self,
        tier: Tier,
        index: Index,
        target: Target,
        fetcher: Fetcher,
        events: EventStream,
        failures: FailureLog,
        failed: Callable[[Key, Tier], None],
    ) -> None:
        self.tier = tier
        self._index = index
        self._target = target
        self._fetcher = fetcher
        self._events = events
        self._failures = failures
        self._failed = failed
        self._doomed: dict[Key, None] = {}
        """Copies that no record has any more and that are still to be removed."""
        self._wanted: set[Key] = set()
        """Copies that wait to be made although nobody asked for them."""
        self.worker = Worker(f"tiers-{tier.value}")

    def want(self, record: Record, *, forced: bool = False, buffer: Buffer | None = None) -> None:
        """Makes a copy of an entry soon; the caller holds the index's lock.

        Args:
            forced: it was asked for, so it may be fetched from another tier for this.
            buffer: its bytes, if no tier keeps them.
        """
        key = record.entry.key
        if self.tier in record.tiers:
            return
        if not forced:
            if key in self._wanted or len(self._wanted) >= _MOST_WAITING:
                return
            self._wanted.add(key)
        record.claims += 1
        if buffer is not None:
            buffer.readers += 1
        self.worker.put(
            lambda: self._bring(record, buffer, forced),
            rank=FORCED_RANK if forced else WRITE_RANK,
            failed=lambda: self._done(record, buffer, forced, False),
        )

    def erase(self, key: Key) -> None:
        """Removes a copy soon that no record has any more; the caller holds the index's lock."""
        self._doomed[key] = None
        self.worker.put(self._erase, rank=ERASE_RANK)

    def _bring(self, record: Record, buffer: Buffer | None, forced: bool) -> None:
        with self._index.lock:
            chain = [record]
            while (parent := chain[-1].parent) is not None and self.tier not in parent.tiers:
                chain.append(parent)
        well = True
        for link in reversed(chain):
            well = well and self._bring_one(link, buffer if link is record else None, forced)
        self._done(record, buffer, forced, well)

    def _done(self, record: Record, buffer: Buffer | None, forced: bool, well: bool) -> None:
        with self._index.lock:
            if not forced:
                self._wanted.discard(record.entry.key)
            elif not well:
                self._failed(record.entry.key, self.tier)
            if buffer is not None:
                self._index.release(record, buffer)
            self._index.unclaim(record)

    def _bring_one(self, record: Record, buffer: Buffer | None, forced: bool) -> bool:
        """Makes one copy, whose predecessor is there; False: it could not be."""
        index, parent = self._index, record.parent
        with index.lock:
            if self.tier in record.tiers:
                return True
            if not index.is_live(record) or (parent is not None and self.tier not in parent.tiers):
                return False
            source = buffer or record.buffer
            if source is not None and source.state == "ready":
                source.readers += 1
            else:
                source = None
        if source is None and forced:
            source = self._fetcher.fetch(record, time.monotonic() + _FETCH_SECONDS)
        if source is None:
            return False
        try:
            return self._write(record, source)
        finally:
            with index.lock:
                index.release(record, source)

    def _write(self, record: Record, source: Buffer) -> bool:
        index, size = self._index, self._index.file_bytes(record)
        if source.run is None:
            raise RuntimeError("a buffer without memory is read")
        began = time.monotonic()
        header, payload = Header(record.entry, source.checksums), index.arena.pieces(source.run)
        try:
            self._make_room(record, size)
            try:
                self._target.write(header, payload)
            except CopyFailed as error:
                if error.reason != "full":
                    raise
                # Others need the room as well: then this tier has to do with what it has.
                self._give_up(record, size)
                self._target.write(header, payload)
        except CopyFailed as error:
            self._failures.tell(self.tier, error.reason, str(error))
            return False
        with index.lock:
            if index.is_live(record):
                index.keep(record, self.tier, size)
            else:
                self.erase(record.entry.key)
        self._events.emit(CopySaved(self.tier, size, time.monotonic() - began))
        return True

    def _make_room(self, record: Record, size: int) -> None:
        """Raises CopyFailed: there cannot be so much."""
        limit = self._index.books[self.tier].limit
        if size > limit:
            raise CopyFailed("full", f"an entry of {size:,} bytes, where the limit is {limit:,}")
        with self._index.lock:
            while self.size + size > limit:
                if not self._evict(record):
                    raise CopyFailed("full", f"no room for {size:,} bytes beside what is needed")
        self._erase()
        if record.entry.key in self._doomed:
            raise CopyFailed("unreadable", "an earlier copy cannot be removed")

    def _give_up(self, record: Record, size: int) -> None:
        with self._index.lock:
            goal = self.size - size
            while self.size > goal and self._evict(record):
                pass
        self._erase()

    @property
    def size(self) -> int:
        """Bytes of this tier that count towards its limit."""
        return self._index.books[self.tier].size

    def _evict(self, record: Record) -> bool:
        """Gives up the copy that is worth least, but not the one that this record stands on."""
        return self._index.evict(self.tier, record.entry.parent)

    def _erase(self) -> None:
        """Removes what is doomed; what cannot be removed is tried again before the next write."""
        for key in list(self._doomed):
            try:
                self._target.remove(key)
            except CopyFailed as error:
                self._failures.tell(self.tier, error.reason, str(error))
                return
            self._doomed.pop(key, None)
