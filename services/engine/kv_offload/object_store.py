"""Store tier: entries as objects of a bucket that all engines of a fleet share.

Objects: prefix-cache/{fingerprint of the layout}-{version of the format}/{key}. An object never changes; every engine
would write the same bytes.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import urllib3

from services.common.errors import TemperError
from services.common.storage.object_store import ListedObject, ObjectNotFound, ObjectStore, PreconditionFailed
from services.engine.kv_cache.keys import Key, Tier
from services.engine.kv_offload.background_copies import ERASE_RANK, Fetcher, LowerTier
from services.engine.kv_offload.entry_format import (
    VERSION,
    Header,
    HeaderRejected,
    decode,
    encode,
    entry_bytes,
    header_bytes,
    header_length,
    spans,
)
from services.engine.kv_offload.index import Buffer, Index, Record
from services.engine.kv_offload.messages import Bytes, Entry, Layout
from services.engine.kv_offload.worker import CopyFailed, FailureLog, Worker
from services.engine.observability.events import CopyEvicted, EventStream

MOST_BYTES = 4 * 2**30
"""Largest object: S3 takes 5 GiB in one PUT."""
_CONNECTIONS = 8
_READ_BYTES = 8 * 2**20
_HEADER_BYTES = 64 * 2**10
"""Bytes read of an object to get its header: enough for one of 15000 tokens."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Backoff after a failure of the store, seconds; doubled with each failure in a row."""
_NAME = re.compile(r"[0-9a-f]{40}")


class StoreObjects:
    """Objects of the store tier. Calls block and are thread-safe. Every method may raise CopyFailed, at once during a
    backoff."""

    def __init__(self, store: ObjectStore, layout: Layout, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._layout = layout
        self._clock = clock
        self._prefix = f"prefix-cache/{layout.fingerprint}-{VERSION}/"
        self._pool = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="tiers-store-read")
        self._lock = threading.Lock()
        self._failures = 0
        self._backoff_until = 0.0

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def pause(self) -> float:
        """Seconds left of the backoff; 0: there is none."""
        return max(0.0, self._backoff_until - self._clock())

    def failed(self) -> None:
        """Begins a backoff, because the store was too slow or did not answer."""
        with self._lock:
            if self._clock() >= self._backoff_until:
                pause = min(_FIRST_PAUSE * 2**self._failures, _LONGEST_PAUSE)
                self._failures = min(self._failures + 1, 16)
                self._backoff_until = self._clock() + pause

    def listing(self) -> Mapping[Key, ListedObject]:
        """All objects of this layout."""
        with self._asking():
            found = self._store.list_objects(self._prefix)
        names = ((listed.key[len(self._prefix) :], listed) for listed in found)
        return {Key(bytes.fromhex(name)): listed for name, listed in names if _NAME.fullmatch(name)}

    def headers(self, wanted: Mapping[Key, ListedObject]) -> Iterator[tuple[Key, Header | CopyFailed]]:
        """Headers of listed objects, or the failure of each that could not be read."""
        return zip(
            wanted, self._pool.map(self._header, wanted, (listed.size for listed in wanted.values())), strict=True
        )

    def _header(self, key: Key, size: int) -> Header | CopyFailed:
        try:
            return self.header(key, size)
        except CopyFailed as error:
            return error

    def header(self, key: Key, size: int) -> Header:
        """Reads the header of an object of so many bytes."""
        with self._asking():
            data = self._range(key, 0, min(size, _HEADER_BYTES))
            try:
                length = header_length(data)
                if len(data) < length <= size:
                    data += self._range(key, len(data), length - len(data))
                return self._checked(data, key, size)
            except HeaderRejected as error:
                raise CopyFailed("damaged", f"object {key.hex()}: {error}") from error

    def read(self, entry: Entry, target: Sequence[Bytes]) -> Header:
        """Reads the payload of an entry into these pieces, which are as long as it is."""
        begin = header_bytes(entry, self._layout)
        tasks: list[Future[None]] = []
        with self._asking():
            try:
                for offset, pieces in spans(target, _READ_BYTES):
                    tasks.append(self._pool.submit(self._read_into, entry.key, begin + offset, pieces))
                data = self._range(entry.key, 0, begin)
            finally:
                wait(tasks)  # they use the memory until then
            for task in tasks:
                task.result()
        try:
            return self._checked(data, entry.key, entry_bytes(entry, self._layout))
        except HeaderRejected as error:
            raise CopyFailed("damaged", f"object {entry.key.hex()}: {error}") from error

    def write(self, header: Header, payload: Sequence[Bytes]) -> None:
        """Writes the object, unless another engine has written it."""
        with self._asking():
            # numpy copies without the interpreter's lock: bytes.join would stop all threads for a tenth of a second.
            item = np.concatenate([np.frombuffer(encode(header, self._layout), np.uint8), *payload])
            try:
                self._store.put(self._name(header.entry.key), item.data, if_absent=True)
            except PreconditionFailed:
                return

    def remove(self, key: Key) -> None:
        """Removes an object, if it is there."""
        with self._asking():
            self._store.delete(self._name(key))

    def _name(self, key: Key) -> str:
        return f"{self._prefix}{key.hex()}"

    def _range(self, key: Key, offset: int, length: int) -> bytes:
        data = bytearray(length)
        self._read_into(key, offset, [memoryview(data)])
        return bytes(data)

    def _read_into(self, key: Key, offset: int, pieces: Sequence[memoryview]) -> None:
        length = sum(map(len, pieces))
        whole = (
            pieces[0] if len(pieces) == 1 else memoryview(bytearray(length))
        )  # one request for each piece would take longer
        if self._store.read_into(self._name(key), offset, whole) != length:
            raise CopyFailed("damaged", f"object {key.hex()} ends before {offset + length:,}")
        if len(pieces) > 1:
            for piece in pieces:
                piece[:] = whole[: len(piece)]
                whole = whole[len(piece) :]

    def _checked(self, data: bytes, key: Key, size: int) -> Header:
        header = decode(data, self._layout)
        if header.entry.key != key or entry_bytes(header.entry, self._layout) != size:
            raise HeaderRejected("the object has the header of another entry, or another length")
        return header

    @contextmanager
    def _asking(self) -> Iterator[None]:
        if pause := self.pause:
            raise CopyFailed("away", f"not asked for another {pause:.0f} s after failures")
        try:
            yield
        except ObjectNotFound as error:
            raise CopyFailed("missing", error.message) from error
        except TemperError as error:
            self.failed()
            slow = isinstance(error.__cause__, urllib3.exceptions.TimeoutError)
            raise CopyFailed("slow" if slow else "away", error.message) from error
        with self._lock:
            self._failures = 0


_REMEMBERED = 10_000
"""Most forgotten keys that are remembered, so that their children from other engines are removed as well."""


@dataclass(frozen=True, slots=True)
class _Orphan:
    """Object whose parent entry is not known here."""

    entry: Entry
    size: int
    modified: float


class StoreTier(LowerTier):
    """Store tier. It finds the entries of other engines by listing the bucket periodically.

    The limit counts for the whole fleet: an engine that finds more removes the leaves of its lowest priority.

    Args:
        poll_seconds: time between two listings.
        after_uses: hits after which an entry is saved to the store; 0: every entry is.
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
        self._orphans: dict[Key, _Orphan] = {}
        self._orphans_of: dict[Key, set[Key]] = {}
        """Orphans by the key of their missing parent."""
        self._forgotten: OrderedDict[Key, None] = OrderedDict()
        self._new_parents: deque[Entry] = deque()
        """Entries with a new first copy whose orphans are still to be adopted."""
        self._adopting = False
        self.poller = Worker("tiers-store-poll")
        self.poller.put(self._poll)
        index.known.append(self._adopt)

    @property
    def size(self) -> int:
        return super().size + sum(orphan.size for orphan in self._orphans.values())

    def consider(self, record: Record, buffer: Buffer | None = None) -> None:
        """Saves an entry to the store if it was used enough; the caller holds the index's lock."""
        # Making the entry counts as a use.
        if not self._after_uses or record.uses > self._after_uses:
            self.want(record, buffer=buffer)

    def forget(self, keys: Collection[Key]) -> None:
        """Removes entries from the store even if they are not known here; the caller holds the index's lock."""
        for key in keys:
            self._forgotten[key] = None
            self._forgotten.move_to_end(key)
            self.erase(key)
        while len(self._forgotten) > _REMEMBERED:
            self._forgotten.popitem(last=False)

    def _make_room(self, record: Record, size: int) -> None:
        if size > MOST_BYTES:
            raise CopyFailed("full", f"the entry has {size:,} bytes, an object at most {MOST_BYTES:,}")
        with self._index.lock:
            self._forgotten.pop(record.entry.key, None)
        super()._make_room(record, size)

    def _evict(self, record: Record | None) -> bool:
        if self._orphans:
            key = min(self._orphans, key=lambda key: self._orphans[key].modified)
            self._events.emit(CopyEvicted(Tier.STORE, self._orphans[key].size))
            self._remove_orphan(key)
            self.erase(key)
            return True
        return self._index.evict(Tier.STORE, None if record is None else record.entry.parent)

    def _erase(self) -> None:
        if self._to_remove:
            super()._erase()
            if self._to_remove:
                self.worker.put(self._erase, rank=ERASE_RANK, at=time.monotonic() + self._objects.pause + 1.0)

    def _poll(self) -> None:
        try:
            with self._index.lock:
                before = set(self._index.usage[Tier.STORE].sizes) | set(self._orphans)
            listed = self._objects.listing()
            self._compare(listed, before)
        except CopyFailed as error:
            self._failures.record(Tier.STORE, error.reason, str(error))
        finally:
            pause = max(self._poll_seconds, self._objects.pause)
            self.poller.put(self._poll, at=time.monotonic() + pause)

    def _compare(self, listed: Mapping[Key, ListedObject], before: Collection[Key]) -> None:
        """Takes in new and missing objects of a listing.

        Args:
            before: objects that were known when the listing began.
        """
        with self._index.lock:
            for key in before - listed.keys():
                record = self._index.find(key)
                if record is not None:
                    self._index.drop(record, Tier.STORE, erase=False)
                self._remove_orphan(key)
            known = self._index.usage[Tier.STORE].sizes.keys() | self._orphans.keys() | self._to_remove.keys()
            new = {key: found for key, found in listed.items() if key not in known}
        entries = []
        for key, header in self._objects.headers(new):
            if isinstance(header, CopyFailed):
                if header.reason != "missing":  # it may have been removed since the listing
                    self._failures.record(Tier.STORE, header.reason, str(header))
                if header.reason == "damaged":
                    with self._index.lock:
                        self.erase(key)
            else:
                entries.append(header.entry)
        for entry in sorted(entries, key=lambda entry: entry.start):
            with self._index.lock:
                self._found(entry, new[entry.key])
        with self._index.lock:
            limit = self._index.usage[Tier.STORE].limit
            while self.size > limit and self._evict(None):
                pass

    def _found(self, entry: Entry, listed: ListedObject) -> None:
        """Takes in an object that was not known: as an entry, as an orphan, or to be removed."""
        if entry.key in self._forgotten or entry.parent in self._forgotten:
            self.forget([entry.key])
        elif not self._add_known(entry, listed.size) and entry.parent is not None:
            self._orphans[entry.key] = _Orphan(entry, listed.size, listed.modified.timestamp())
            self._orphans_of.setdefault(entry.parent, set()).add(entry.key)

    def _add_known(self, entry: Entry, size: int) -> bool:
        """Adds an entry to the index; False: its parent is not known."""
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

    def _adopt(self, record: Record) -> None:
        """Adds the orphans of an entry that has its first copy."""
        self._new_parents.append(record.entry)
        if self._adopting:  # not recursive: a chain may be long
            return
        self._adopting = True
        try:
            while self._new_parents:
                for key in list(self._orphans_of.get(self._new_parents.popleft().key, ())):
                    orphan = self._orphans[key]
                    self._remove_orphan(key)
                    self._add_known(orphan.entry, orphan.size)
        finally:
            self._adopting = False

    def _remove_orphan(self, key: Key) -> None:
        """Removes an object from the orphans, if it is one."""
        orphan = self._orphans.pop(key, None)
        if orphan is None or orphan.entry.parent is None:
            return
        waiting = self._orphans_of[orphan.entry.parent]
        waiting.discard(key)
        if not waiting:
            del self._orphans_of[orphan.entry.parent]
