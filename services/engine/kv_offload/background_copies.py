"""Background copies: entries are fetched from disk or store to the host, and written to disk and store and removed from
them in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.engine.kv_cache.keys import Key, Tier
from services.engine.kv_offload.entry_format import Header
from services.engine.kv_offload.host_memory import Run
from services.engine.kv_offload.index import Buffer, Index, Record
from services.engine.kv_offload.messages import Bytes, Entry, Persisted, TierEvent
from services.engine.kv_offload.worker import Bandwidth, CopyFailed, FailureLog, Worker
from services.engine.observability.events import CopySaved, EventStream

FIRST_RANK, ERASE_RANK, FORCED_RANK, WRITE_RANK, TOUCH_RANK = range(5)
_MOST_WAITING = 1024
"""Most copies that wait to be made without a request for them; further ones are not made."""
_FETCH_SECONDS = 60.0
"""Longest read from another tier that a Persist waits for."""


class Target(Protocol):
    """Storage that copies are written to. Every method may raise CopyFailed."""

    def write(self, header: Header, payload: Sequence[Bytes]) -> None: ...

    def remove(self, key: Key) -> None: ...


@dataclass(eq=False, slots=True)
class _Copy:
    """Copy of an entry that a tier makes, behind those of its parents."""

    record: Record
    buffer: Buffer | None
    """Its bytes, if no tier keeps them; the copy is a reader of it."""
    forced: bool
    links: list[Record]
    """What is still to be copied, parents first."""
    fetched: Buffer | None = None
    """Bytes of the first of them that were fetched for this; the copy is a reader of it."""


class LowerTier:
    """Copies of one tier below the host. A parent is written before its children and removed after them. Thread-safe.

    Copies whose bytes have to be fetched wait for them in a thread of their own. Copies that wait for the one that
    writes may hold the memory that the fetch needs.

    Args:
        failed: called, under the index's lock, when a requested copy will not be made.
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
        self._to_remove: dict[Key, None] = {}
        """Keys of copies that no record has any more and that are still to be removed."""
        self._wanted: set[Key] = set()
        """Keys of copies that wait to be made without a request for them."""
        self.worker = Worker(f"tiers-{tier.value}")
        self.fetches = Worker(f"tiers-{tier.value}-fetch")

    def want(self, record: Record, *, forced: bool = False, buffer: Buffer | None = None) -> None:
        """Schedules a copy of an entry; the caller holds the index's lock.

        Args:
            forced: whether the copy was requested, so that the entry may be fetched from another tier for it.
            buffer: bytes of the entry, if no tier keeps them.
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
        copy = _Copy(record, buffer, forced, [])
        self.worker.put(
            lambda: self._begin(copy),
            rank=FORCED_RANK if forced else WRITE_RANK,
            failed=lambda: self._done(copy, False),
        )

    def erase(self, key: Key) -> None:
        """Schedules the removal of a copy that no record has any more; the caller holds the index's lock."""
        self._to_remove[key] = None
        self.worker.put(self._erase, rank=ERASE_RANK)

    @property
    def workers(self) -> tuple[Worker, Worker]:
        """What gives each other its copies to make."""
        return self.worker, self.fetches

    def _begin(self, copy: _Copy) -> None:
        with self._index.lock:
            copy.links = [copy.record]
            while (parent := copy.links[0].parent) is not None and self.tier not in parent.tiers:
                copy.links.insert(0, parent)
        self._go_on(copy)

    def _go_on(self, copy: _Copy) -> None:
        """Makes copies until they are made, one cannot be, or the bytes of one have to be fetched."""
        while copy.links:
            made = self._copy(copy)
            if made is None and copy.forced:
                self._let_go(copy)
                self.fetches.put(lambda: self._fetch(copy), failed=lambda: self._done(copy, False))
                return
            if not made:
                break
            copy.links.pop(0)
        self._done(copy, not copy.links)

    def _fetch(self, copy: _Copy) -> None:
        if self.tier not in copy.links[0].tiers:  # nobody has copied it while this waited
            copy.fetched = self._fetcher.fetch(copy.links[0], time.monotonic() + _FETCH_SECONDS)
        if copy.fetched is None and self.tier not in copy.links[0].tiers:
            self._done(copy, False)
        else:
            self.worker.put(lambda: self._go_on(copy), rank=FORCED_RANK, failed=lambda: self._done(copy, False))

    def _done(self, copy: _Copy, succeeded: bool) -> None:
        record = copy.record
        with self._index.lock:
            if not copy.forced:
                self._wanted.discard(record.entry.key)
            elif not succeeded:
                self._failed(record.entry.key, self.tier)
            if copy.fetched is not None:
                self._index.release(copy.links[0], copy.fetched)
            self._let_go(copy)
            self._index.unclaim(record)

    def _let_go(self, copy: _Copy) -> None:
        """Gives up the bytes that a copy came with: the fetch for which it waits may need their memory."""
        with self._index.lock:
            if copy.buffer is not None:
                self._index.release(copy.record, copy.buffer)
                copy.buffer = None

    def _copy(self, copy: _Copy) -> bool | None:
        """Makes the next copy, whose parent is there; False: it cannot be made, None: its bytes are not in memory."""
        index, record = self._index, copy.links[0]
        with index.lock:
            source, copy.fetched = copy.fetched, None
            if source is None:
                source = copy.buffer if copy.buffer is not None and record is copy.record else record.buffer
                if source is not None and source.state == "ready":
                    source.readers += 1
                else:
                    source = None
        try:
            with index.lock:
                parent = record.parent
                if self.tier in record.tiers:
                    return True
                if not index.is_live(record) or (parent is not None and self.tier not in parent.tiers):
                    return False
            return None if source is None else self._write(record, source)
        finally:
            if source is not None:
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
                # Somebody else fills the disk too: this tier makes room by evicting its own copies.
                self._give_up(record, size)
                self._target.write(header, payload)
        except CopyFailed as error:
            self._failures.record(self.tier, error.reason, str(error))
            return False
        with index.lock:
            if index.is_live(record):
                index.keep(record, self.tier, size)
            else:
                self.erase(record.entry.key)
        self._events.emit(CopySaved(self.tier, size, time.monotonic() - began))
        return True

    def _make_room(self, record: Record, size: int) -> None:
        """Evicts copies until ``size`` bytes fit the limit; raises CopyFailed if they cannot."""
        limit = self._index.usage[self.tier].limit
        if size > limit:
            raise CopyFailed("full", f"the entry has {size:,} bytes, the limit is {limit:,}")
        with self._index.lock:
            while self.size + size > limit:
                if not self._evict(record):
                    raise CopyFailed("full", f"no room for {size:,} bytes beside the entries that are needed")
        self._erase()
        if record.entry.key in self._to_remove:
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
        return self._index.usage[self.tier].size

    def _evict(self, record: Record) -> bool:
        """Evicts the copy of the lowest priority, but not the parent of this record."""
        return self._index.evict(self.tier, record.entry.parent)

    def _erase(self) -> None:
        """Removes the copies to remove; what cannot be removed is tried again before the next write."""
        for key in list(self._to_remove):
            try:
                self._target.remove(key)
            except CopyFailed as error:
                self._failures.record(self.tier, error.reason, str(error))
                return
            self._to_remove.pop(key, None)


class _Persist:
    def __init__(self, persist_id: int, wanted: set[tuple[Key, Tier]]) -> None:
        self.persist_id = persist_id
        self.wanted = wanted
        self.missing: list[tuple[Key, Tier]] = []


class PersistTracker:
    """Tracks each Persist until its copies are made or have failed, then sends Persisted. Not thread-safe.

    Args:
        tiers: tiers that entries are copied to.
    """

    def __init__(self, tiers: Collection[Tier], send_event: Callable[[TierEvent], None]) -> None:
        self._tiers = tiers
        self._send_event = send_event
        self._open: list[_Persist] = []

    def begin(
        self, persist_id: int, wanted: Collection[tuple[Key, Tier]], missing: Collection[tuple[Key, Tier]]
    ) -> None:
        """Begins a Persist that waits for the wanted copies; others are known to be missing."""
        persist = _Persist(persist_id, set(wanted))
        persist.missing.extend(missing)
        self._open.append(persist)
        self._end_those_done()

    def kept(self, key: Key, tier: Tier) -> None:
        """Records that a copy was made."""
        self._settle(key, tier, missing=False)

    def failed(self, key: Key, tier: Tier) -> None:
        """Records that a copy could not be made."""
        self._settle(key, tier, missing=True)

    def gone(self, key: Key) -> None:
        """Records that an entry was removed."""
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
            self._send_event(Persisted(persist.persist_id, tuple(persist.missing)))


_THREADS = 4
"""Number of entries that are read at once, each by several more threads."""


class Source(Protocol):
    """Storage that entries are read from."""

    def read(self, entry: Entry, target: Sequence[Bytes]) -> Header:
        """Reads the payload of an entry into ``target``; raises CopyFailed."""
        ...


class Fetcher:
    """Reads entries from disk and store into the host's arena. Thread-safe.

    Args:
        sources: storage of each tier, fastest first.
    """

    def __init__(
        self, index: Index, sources: Mapping[Tier, Source], bandwidth: Bandwidth, failures: FailureLog
    ) -> None:
        self._index = index
        self._sources = sources
        self._bandwidth = bandwidth
        self._failures = failures
        self._ended: dict[Tier, float] = {}
        """End of the last read of each tier."""
        self.worker = Worker("tiers-fetch", _THREADS)

    def begin(self, record: Record, until: float, run: Run | None = None) -> Buffer:
        """Begins to read an entry into a new buffer; the caller holds the index's lock.

        Args:
            until: time of time.monotonic() after which nobody needs it any more.
            run: memory for it; None: other entries may be evicted for it.
        """
        buffer = self._index.new_buffer(record)
        buffer.run = run
        buffer.origin = next((tier for tier in self._sources if tier in record.tiers), None)
        self.worker.put(
            lambda: self._fill(record, buffer, until),
            rank=0 if run is None else 1,
            failed=lambda: self._give_up(record, buffer),
        )
        return buffer

    def fetch(self, record: Record, until: float) -> Buffer | None:
        """Waits until the bytes are in the arena; None: they could not be read. The caller releases the buffer."""
        with self._index.lock:
            buffer = record.buffer
            if buffer is None:
                if not any(tier in record.tiers for tier in self._sources):
                    return None
                buffer = self.begin(record, until)
            buffer.readers += 1
            return self._wait(record, buffer, until)

    def warm(self, record: Record, until: float) -> bool:
        """Reads an entry into free memory of the arena and waits for it; False: there is no free memory."""
        with self._index.lock:
            if record.buffer is not None or Tier.DISK not in record.tiers:
                return True
            run = self._index.take_room(self._index.layout.payload_bytes(record.entry), evict=False)
            if run is None:
                return False
            buffer = self.begin(record, until, run)
            buffer.readers += 1
            if self._wait(record, buffer, until) is not None:
                self._index.release(record, buffer)
            return True

    def _wait(self, record: Record, buffer: Buffer, until: float) -> Buffer | None:
        """Waits until the buffer is ready; if that fails, releases it and returns None."""
        while buffer.state == "filling" and (left := until - time.monotonic()) > 0:
            self._index.lock.wait(left)
        if buffer.state == "ready":
            return buffer
        self._index.release(record, buffer)
        return None

    def _fill(self, record: Record, buffer: Buffer, until: float) -> None:
        entry, index = record.entry, self._index
        size = index.layout.payload_bytes(entry)
        run = buffer.run or self._take_room(size, until)
        if run is None:
            self._failures.record(Tier.HOST, "full", f"no room for {size:,} bytes of an entry to load")
            self._give_up(record, buffer)
            return
        buffer.run = run
        for tier, source in self._sources.items():
            with index.lock:
                if tier not in record.tiers:
                    continue
                buffer.origin = tier
            began = time.monotonic()
            try:
                header = source.read(entry, index.arena.pieces(run))
            except CopyFailed as error:
                self._failed(record, tier, error)
                continue
            with index.lock:
                # Concurrent reads are served one after the other: this one's time begins with the last one's end.
                began, ended = max(began, self._ended.get(tier, 0.0)), time.monotonic()
                self._ended[tier] = ended
                self._bandwidth.measured(tier, size, ended - began)
                index.ready(record, buffer, header.checksums, tier)
                index.release(record, buffer)
            return
        self._give_up(record, buffer)

    def _take_room(self, size: int, until: float) -> Run | None:
        """Allocates memory; waits for readers of other buffers if need be."""
        index = self._index
        with index.lock:
            while (run := index.take_room(size)) is None:
                left = until - time.monotonic()
                if left <= 0 or index.arena.room(size) > index.arena.limit:
                    return None
                index.lock.wait(left)
            return run

    def _failed(self, record: Record, tier: Tier, error: CopyFailed) -> None:
        with self._index.lock:
            if tier not in record.tiers or not self._index.is_live(record):
                return  # it was dropped while it was read
            if error.reason not in ("slow", "away"):
                self._index.drop(record, tier, erase=error.reason != "missing")
        self._failures.record(tier, error.reason, str(error))

    def _give_up(self, record: Record, buffer: Buffer) -> None:
        with self._index.lock:
            if buffer.state == "filling":
                self._index.failed(record, buffer)
