"""Entries as objects of a bucket that all engines of a fleet share.

Objects: prefix-cache/{fingerprint of the layout}-{version of the format}/{key}. An object never changes, and whoever
makes it first makes it as good as any other.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import numpy as np
import urllib3

from services.common.errors import TemperError
from services.common.storage.object_store import ListedObject, ObjectNotFound, ObjectStore, PreconditionFailed
from services.engine.kv_cache.keys import Key
from services.engine.kv_offload.entry_format.header import (
    VERSION,
    Header,
    HeaderRejected,
    decode,
    encode,
    header_bytes,
    header_length,
    item_bytes,
)
from services.engine.kv_offload.entry_format.spans import spans
from services.engine.kv_offload.failures import CopyFailed
from services.engine.kv_offload.messages import Bytes, Entry, Layout

MOST_BYTES = 4 * 2**30
"""Of an object: S3 takes 5 GiB in one PUT."""
_CONNECTIONS = 8
_READ_BYTES = 8 * 2**20
_HEADER_BYTES = 64 * 2**10
"""What is read of an object to see its header: enough for one of 15000 tokens."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds that the store is left alone after a failure, doubled with each in a row."""
_NAME = re.compile(r"[0-9a-f]{40}")


class StoreObjects:
    """Blocking and thread-safe. Every method may raise CopyFailed, at once while the store is left alone."""

    def __init__(self, store: ObjectStore, layout: Layout, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._layout = layout
        self._clock = clock
        self._prefix = f"prefix-cache/{layout.fingerprint}-{VERSION}/"
        self._pool = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="tiers-store-read")
        self._lock = threading.Lock()
        self._failures = 0
        self._alone_until = 0.0

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def pause(self) -> float:
        """Seconds for which the store is still left alone."""
        return max(0.0, self._alone_until - self._clock())

    def failed(self) -> None:
        """It was too slow for somebody, or does not answer: it is left alone for a while."""
        with self._lock:
            if self._clock() >= self._alone_until:
                pause = min(_FIRST_PAUSE * 2**self._failures, _LONGEST_PAUSE)
                self._failures = min(self._failures + 1, 16)
                self._alone_until = self._clock() + pause

    def listing(self) -> Mapping[Key, ListedObject]:
        """All objects of this layout."""
        with self._asking():
            found = self._store.list_objects(self._prefix)
        names = ((listed.key[len(self._prefix) :], listed) for listed in found)
        return {Key(bytes.fromhex(name)): listed for name, listed in names if _NAME.fullmatch(name)}

    def headers(self, wanted: Mapping[Key, ListedObject]) -> Iterator[tuple[Key, Header | CopyFailed]]:
        """Those of listed objects, and what is wrong with the others."""
        return zip(
            wanted, self._pool.map(self._header, wanted, (listed.size for listed in wanted.values())), strict=True
        )

    def _header(self, key: Key, size: int) -> Header | CopyFailed:
        try:
            return self.header(key, size)
        except CopyFailed as error:
            return error

    def header(self, key: Key, size: int) -> Header:
        """That of an object of so many bytes."""
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
                wait(tasks)  # the memory is theirs until then
            for task in tasks:
                task.result()
        try:
            return self._checked(data, entry.key, item_bytes(entry, self._layout))
        except HeaderRejected as error:
            raise CopyFailed("damaged", f"object {entry.key.hex()}: {error}") from error

    def write(self, header: Header, payload: Sequence[Bytes]) -> None:
        """Makes the object; that somebody else has made it is as good."""
        with self._asking():
            # numpy copies without the interpreter's lock: bytes.join would stop all threads for a tenth of a second.
            item = np.concatenate([np.frombuffer(encode(header, self._layout), np.uint8), *payload])
            try:
                self._store.put(self._name(header.entry.key), item.data, if_absent=True)
            except PreconditionFailed:
                return

    def remove(self, key: Key) -> None:
        """None there is fine."""
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
        )  # a question for each would take longer
        if self._store.read_into(self._name(key), offset, whole) != length:
            raise CopyFailed("damaged", f"object {key.hex()} ends before {offset + length:,}")
        if len(pieces) > 1:
            for piece in pieces:
                piece[:] = whole[: len(piece)]
                whole = whole[len(piece) :]

    def _checked(self, data: bytes, key: Key, size: int) -> Header:
        header = decode(data, self._layout)
        if header.entry.key != key or item_bytes(header.entry, self._layout) != size:
            raise HeaderRejected("the object of another entry, or of another length")
        return header

    @contextmanager
    def _asking(self) -> Iterator[None]:
        if pause := self.pause:
            raise CopyFailed("away", f"left alone for another {pause:.0f} s after failures")
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
