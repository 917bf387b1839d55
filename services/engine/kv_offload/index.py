"""Index of the tiers: entries, their copies and bytes, and eviction where there is no room.

Entries form a forest. An entry is known only while its parent is: when the last copy of an entry goes, all of its
descendants go as well, deepest first. On disk and in the store a copy needs its parent's copy there, so only leaves are
evicted. The host may evict any entry that a lower tier has, and of the others only leaves. An entry that is being read
or written is not evicted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from services.engine.kv_cache.block_pool import IntegrityError
from services.engine.kv_cache.eviction import EvictionQueue
from services.engine.kv_cache.keys import Key, Tier
from services.engine.kv_offload.entry_format import entry_bytes
from services.engine.kv_offload.host_memory import HostArena, Run
from services.engine.kv_offload.messages import Entry, Layout, Removed, Stored, TierEvent
from services.engine.observability.events import CopyEvicted, EventStream
from services.engine.observability.status import TierStatus

_REMEMBERED = 1024
"""Removed entries that are remembered, more than are removed between two looks of the loop at its events."""


class Buffer:
    """Buffer in the arena with the bytes of an entry: its host copy, or a copy in transit."""

    __slots__ = ("checksums", "kept", "origin", "readers", "run", "state", "waiters")

    def __init__(self) -> None:
        self.run: Run | None = None
        self.checksums: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.state: Literal["filling", "ready", "failed"] = "filling"
        self.readers = 1
        """Number of readers and writers of the bytes; the first one fills the buffer."""
        self.kept = False
        """True if it is the host tier's copy."""
        self.origin: Tier | None = None
        """Tier that the bytes come from; None: from the device, or imported."""
        self.waiters: list[Callable[[bool], None]] = []
        """Calls to make, under the lock, when the bytes are there (True) or will not be (False)."""


class Record:
    """Record of an entry that some tier has or is about to have."""

    __slots__ = ("buffer", "children", "claims", "entry", "parent", "persisted", "pinned_until", "tiers", "uses")

    def __init__(self, entry: Entry, parent: Record | None) -> None:
        self.entry = entry
        self.parent = parent
        self.children: set[Record] = set()
        self.tiers: set[Tier] = set()
        """Tiers that have a copy."""
        self.buffer: Buffer | None = None
        self.claims = 0
        """Number of commands that may still make a first copy."""
        self.uses = 0
        """Number of times that it was made or served a hit."""
        self.pinned_until = 0.0
        self.persisted = False
        """True if it must be in every tier."""


class TierUsage:
    """Copies and bytes of one tier."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        """Bytes of all copies together."""
        self.sizes: dict[Key, int] = {}
        self.num_children: dict[Key, int] = {}
        """Number of an entry's children that the tier has copies of."""
        self.eviction: EvictionQueue[Key] = EvictionQueue()


class Index:
    """Index of entries and their copies. Not thread-safe: callers hold ``lock``.

    Args:
        limits: most bytes of each configured tier.
        send_event: called with each event, in order.
        erase: called with a copy of a lower tier whose bytes must be removed.
        price: returns the seconds that loading so many bytes from a tier takes.
    """

    def __init__(
        self,
        layout: Layout,
        arena: HostArena,
        limits: Mapping[Tier, int],
        events: EventStream,
        *,
        send_event: Callable[[TierEvent], None],
        erase: Callable[[Tier, Key], None],
        price: Callable[[Tier, int], float],
    ) -> None:
        self.layout = layout
        self.arena = arena
        self.lock = threading.Condition(threading.RLock())
        """Notified when a buffer is filled and when one has fewer readers."""
        self.usage = {tier: TierUsage(limit) for tier, limit in limits.items()}
        self._events = events
        self._send_event = send_event
        self._erase = erase
        self._price = price
        self._records: dict[Key, Record] = {}
        self._detached: set[Buffer] = set()
        """Buffers that no record has any more and somebody still reads."""
        self.known: list[Callable[[Record], None]] = []
        """Calls to make when an entry gets its first copy."""
        self.gone: list[Callable[[Key], None]] = []
        """Calls to make when a record is removed."""
        self._lately_gone: dict[Key, None] = {}
        """The last _REMEMBERED keys of entries that are gone, oldest first."""

    # Records.

    def find(self, key: Key) -> Record | None:
        return self._records.get(key)

    def is_live(self, record: Record) -> bool:
        """True unless the record was removed meanwhile."""
        return self._records.get(record.entry.key) is record

    def came_late(self, entry: Entry) -> bool:
        """True if the parent of an entry, which is not known, was known until lately: whoever chose it has not heard of
        its end. Then the entry, which nobody will make, counts as gone as well."""
        late = entry.parent in self._lately_gone
        if late:
            self._remember(entry.key)
        return late

    def _remember(self, key: Key) -> None:
        self._lately_gone.pop(key, None)
        self._lately_gone[key] = None
        if len(self._lately_gone) > _REMEMBERED:
            del self._lately_gone[next(iter(self._lately_gone))]

    def records(self) -> Iterator[Record]:
        return iter(list(self._records.values()))

    def stands(self, record: Record) -> bool:
        """True if the host may keep the entry now: it is live, and its parent has a copy."""
        parent = record.parent
        return self.is_live(record) and (parent is None or bool(parent.tiers) or Tier.HOST not in self.usage)

    def expect(self, entry: Entry) -> Record | None:
        """Record of an entry that will be copied, with a claim on it; None: its parent is not known."""
        record = self._records.get(entry.key)
        if record is None:
            parent = None if entry.parent is None else self._records.get(entry.parent)
            if entry.parent is not None and (parent is None or parent.entry.end != entry.start):
                return None
            record = self._records[entry.key] = Record(entry, parent)
            if parent is not None:
                parent.children.add(record)
        record.claims += 1
        return record

    def unclaim(self, record: Record) -> None:
        """Ends the claim of a command that expected a copy."""
        record.claims -= 1
        if not record.claims and not record.tiers and self.is_live(record):
            self._die(record)

    # Copies.

    def keep(self, record: Record, tier: Tier, size: int) -> None:
        """Records that a tier has a copy of a live record."""
        if tier in record.tiers:
            return
        key, parent = record.entry.key, record.entry.parent
        first = not record.tiers
        record.tiers.add(tier)
        usage = self.usage[tier]
        usage.size += size
        usage.sizes[key] = size
        usage.eviction.add(key, record.entry.seconds, size, uses=max(1, record.uses))
        if record.pinned_until:
            usage.eviction.pin(key, record.pinned_until)
        if tier is not Tier.HOST:
            if usage.num_children.get(key):
                usage.eviction.hold(key, True)
            if parent is not None:
                usage.num_children[parent] = usage.num_children.get(parent, 0) + 1
                if parent in usage.eviction:
                    usage.eviction.hold(parent, True)
        self._reprice(record)
        self._send_event(Stored(record.entry, tier))
        if first:
            for call in self.known:
                call(record)

    def drop(self, record: Record, tier: Tier, *, erase: bool = True) -> None:
        """Removes a tier's copy; if it was the last one, all descendants are removed as well.

        Args:
            erase: whether its bytes are there and must be removed.
        """
        if tier not in record.tiers or not self.is_live(record):
            return
        if record.tiers == {tier}:
            for child in list(record.children):
                self._die(child)
            if not record.claims:
                self._die(record, keep_bytes=None if erase else tier)
                return
        self._take_away(record, tier, erase)
        self._reprice(record)

    def forget(self, record: Record) -> None:
        """Removes an entry and all its descendants from every tier."""
        if self.is_live(record):
            self._die(record)

    def _die(self, record: Record, keep_bytes: Tier | None = None) -> None:
        stack = [record]
        order: list[Record] = []
        while stack:
            order.append(stack.pop())
            stack.extend(order[-1].children)
        for dying in reversed(order):  # no recursion: a chain may be long
            for tier in sorted(dying.tiers, key=lambda tier: tier.value):
                self._take_away(dying, tier, erase=dying is not record or tier is not keep_bytes)
            if dying.parent is not None:
                dying.parent.children.discard(dying)
            self._detach(dying)
            del self._records[dying.entry.key]
            self._remember(dying.entry.key)
            for call in self.gone:
                call(dying.entry.key)

    def _take_away(self, record: Record, tier: Tier, erase: bool) -> None:
        key, parent = record.entry.key, record.entry.parent
        usage = self.usage[tier]
        record.tiers.discard(tier)
        usage.size -= usage.sizes.pop(key)
        usage.eviction.remove(key)
        if tier is not Tier.HOST and parent is not None:
            left = usage.num_children[parent] - 1
            if left:
                usage.num_children[parent] = left
            else:
                del usage.num_children[parent]
                if parent in usage.eviction:
                    usage.eviction.hold(parent, False)
        self._send_event(Removed(key, tier))
        if tier is Tier.HOST:
            self._detach(record)
        elif erase:
            self._erase(tier, key)

    def _reprice(self, record: Record) -> None:
        """Updates the eviction priorities of an entry's copies: losing one costs computing it, or loading it from a
        lower tier."""
        key, seconds = record.entry.key, record.entry.seconds
        for tier in reversed(Tier):
            if tier in record.tiers:
                size = self.usage[tier].sizes[key]
                self.usage[tier].eviction.update(key, seconds, size)
                seconds = min(seconds, self._price(tier, size))

    # Use.

    def use(self, record: Record) -> None:
        record.uses += 1
        for tier in record.tiers:
            self.usage[tier].eviction.touch(record.entry.key)

    def pin(self, record: Record, until: float) -> None:
        record.pinned_until = until
        for tier in record.tiers:
            self.usage[tier].eviction.pin(record.entry.key, until)

    # Buffers.

    def new_buffer(self, record: Record) -> Buffer:
        """Buffer that the caller fills, and then calls ``ready`` or ``failed``."""
        if record.buffer is not None:
            raise IntegrityError("a second buffer of one entry")
        record.buffer = Buffer()
        return record.buffer

    def ready(self, record: Record, buffer: Buffer, checksums: npt.NDArray[np.int64], origin: Tier | None) -> None:
        """Marks a buffer as filled. The caller remains a reader until ``release``."""
        buffer.checksums, buffer.origin, buffer.state = checksums, origin, "ready"
        if Tier.HOST in self.usage and buffer.run is not None and self.is_live(record) and record.buffer is buffer:
            buffer.kept = True
            self.keep(record, Tier.HOST, self.arena.room(buffer.run.size))
        self._answer(buffer, True)

    def failed(self, record: Record, buffer: Buffer) -> None:
        """Marks a buffer as failed; the caller no longer writes to it."""
        buffer.state = "failed"
        if record.buffer is buffer:
            self._detach(record)
        self._answer(buffer, False)
        self.release(record, buffer)

    def spoil(self, record: Record, buffer: Buffer) -> bool:
        """Drops a buffer whose bytes are damaged; False: that was found out before."""
        if record.buffer is not buffer:
            return False
        if buffer.kept:
            self.drop(record, Tier.HOST)
        else:
            self._detach(record)
        return True

    def release(self, record: Record, buffer: Buffer) -> None:
        """Removes a reader of a buffer."""
        buffer.readers -= 1
        if buffer.readers < 0:
            raise IntegrityError("a buffer is released that nobody reads")
        self.lock.notify_all()
        if buffer.readers or buffer.kept:
            return
        if record.buffer is buffer:
            record.buffer = None
        self._free(buffer)

    def _answer(self, buffer: Buffer, there: bool) -> None:
        waiters, buffer.waiters = buffer.waiters, []
        for call in waiters:
            call(there)
        self.lock.notify_all()

    def _detach(self, record: Record) -> None:
        buffer, record.buffer = record.buffer, None
        if buffer is None:
            return
        buffer.kept = False
        if buffer.readers:
            self._detached.add(buffer)
        else:
            self._free(buffer)

    def _free(self, buffer: Buffer) -> None:
        self._detached.discard(buffer)
        if buffer.run is not None:
            self.arena.give_back(buffer.run)
            buffer.run = None
        self.lock.notify_all()

    # Room.

    def take_room(self, size: int, *, evict: bool = True) -> Run | None:
        """Allocates memory of the arena, evicting host copies if need be; None: too much of it is in use."""
        run = self.arena.take(size)
        if run is not None or not evict or Tier.HOST not in self.usage:
            return run

        def may_go(key: Key) -> bool:
            record = self._records[key]
            # An expected entry counts as a child: its parent stays.
            return not self._is_read(key) and (len(record.tiers) > 1 or not record.children)

        usage = self.usage[Tier.HOST]
        can = sum(size for key, size in usage.sizes.items() if not self._is_read(key))
        if self.arena.free + can < self.arena.room(size):
            return None
        while run is None:
            if not self._evict(Tier.HOST, may_go):
                return None
            run = self.arena.take(size)
        return run

    def evict(self, tier: Tier, keep: Key | None) -> bool:
        """Evicts the leaf of the lowest priority from a lower tier; False: there is none.

        Args:
            keep: entry that is not evicted.
        """
        return self._evict(tier, lambda key: key != keep)

    def _evict(self, tier: Tier, may_go: Callable[[Key], bool]) -> bool:
        usage = self.usage[tier]
        key = usage.eviction.pop_least(time.monotonic(), may_go)
        if key is None:
            return False
        self._events.emit(CopyEvicted(tier, usage.sizes[key]))
        self.drop(self._records[key], tier)
        return True

    def _is_read(self, key: Key) -> bool:
        buffer = self._records[key].buffer
        return buffer is None or buffer.readers > 0

    def file_bytes(self, record: Record) -> int:
        """Bytes of an entry's copy on disk or in the store."""
        return entry_bytes(record.entry, self.layout)

    # Status and integrity check.

    def status(self) -> dict[Tier, TierStatus]:
        return {tier: TierStatus(len(usage.sizes), usage.size, usage.limit) for tier, usage in self.usage.items()}

    def check(self) -> None:
        """Raises IntegrityError if records, tiers and memory contradict each other."""
        buffers = {record.buffer for record in self._records.values() if record.buffer is not None} | self._detached
        self.arena.check(buffer.run for buffer in buffers if buffer.run is not None)
        for tier, usage in self.usage.items():
            keys = {key for key, record in self._records.items() if tier in record.tiers}
            if (
                not keys == set(usage.sizes)
                or usage.size != sum(usage.sizes.values())
                or len(usage.eviction) != len(keys)
            ):
                raise IntegrityError(f"the sizes of the {tier.value} tier differ from what its records say")
        for key, record in self._records.items():
            parent = record.entry.parent
            if parent is not None and (parent not in self._records or record not in self._records[parent].children):
                raise IntegrityError("an entry is known, but its parent is not")
            if not record.tiers and not record.claims:
                raise IntegrityError("an entry is known, but no tier has it")
            if record.entry.key != key or (Tier.HOST in record.tiers) != (
                record.buffer is not None and record.buffer.kept
            ):
                raise IntegrityError("a host copy without its memory")
