"""Disk tier: one file for each entry in a directory, which is also the index.

A file is written under another name, flushed and renamed, so after a crash it is there as a whole or not at all. Its
name is the entry's key; everything else in the directory is left alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from services.engine.kv_cache.keys import Key, Tier
from services.engine.kv_offload.background_copies import FIRST_RANK, TOUCH_RANK, Fetcher, LowerTier
from services.engine.kv_offload.entry_format import (
    PREFIX_BYTES,
    Header,
    HeaderRejected,
    NewerFormat,
    decode,
    encode,
    entry_bytes,
    header_bytes,
    header_length,
    spans,
)
from services.engine.kv_offload.index import Index, Record
from services.engine.kv_offload.messages import Bytes, Entry, Layout
from services.engine.kv_offload.worker import Bandwidth, CopyFailed, FailureLog, Worker
from services.engine.observability.events import CopyFailure, EventStream

_THREADS = 8
"""Threads that read one entry: a single one gets a third of the speed of a fast disk or of the page cache."""
_READ_BYTES = 4 * 2**20
_PROBE_BYTES = 32 * 2**20
"""Bytes read to measure the disk's speed: a slow disk takes a third of a second."""
_WRITE_BYTES = 64 * 2**20
_MOST_PIECES = 1024
"""IOV_MAX of Linux."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NAME = re.compile(r"[0-9a-f]{40}\.entry")
_UNFINISHED = re.compile(r"[0-9a-f]{40}\.entry\.new")


class DirectoryInUse(Exception):
    """The directory belongs to another engine or cannot be used; the message names the setting."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """File of an entry that was there at the start."""

    header: Header
    size: int
    used: float
    """Time of the last use, or of creation: seconds since 1970."""


class DiskFiles:
    """Files of the disk tier. Calls block. ``read`` may be called by several threads, the rest by one at a time; every
    method may raise CopyFailed.

    Raises:
        DirectoryInUse: the directory cannot be made or locked.
    """

    def __init__(self, directory: Path, layout: Layout) -> None:
        self._directory = directory
        self._layout = layout
        self._readers = ThreadPoolExecutor(_THREADS, thread_name_prefix="tiers-read")
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if directory.stat().st_uid == os.geteuid():
                directory.chmod(0o700)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DirectoryInUse(
                f"TEMPER_TIER_DISK_DIR={directory} cannot be used: {error.strerror}; set it to a directory that this "
                "user may write, or take disk out of TEMPER_TIERS"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise DirectoryInUse(
                f"TEMPER_TIER_DISK_DIR={directory} belongs to an engine that is running; give each engine a directory "
                "of its own"
            ) from error

    def close(self) -> None:
        """Unlocks the directory: another engine may use it from now on."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        os.close(self._lock)

    def scan(self) -> tuple[list[FoundFile], list[tuple[CopyFailure, str]]]:
        """Lists the entries of the directory, in no order, and the failures of the other files. Damaged files and those
        of another model are removed."""
        try:
            names = os.listdir(self._directory)
        except OSError as error:
            raise _failure(error, "listing the directory") from error
        for name in filter(_UNFINISHED.fullmatch, names):
            with suppress(OSError):
                os.unlink(self._directory / name)
        found: list[FoundFile] = []
        wrong: list[tuple[CopyFailure, str]] = []
        for answer in self._readers.map(self._look, filter(_NAME.fullmatch, names)):
            if isinstance(answer, FoundFile):
                found.append(answer)
            else:
                wrong.append(answer)
        return found, wrong

    def read(self, entry: Entry, target: Sequence[Bytes]) -> Header:
        """Reads the payload of an entry into these pieces, which are as long as it is."""
        return self._read(entry, target)

    def probe(self, entry: Entry) -> tuple[int, float]:
        """Measures the disk: reads the beginning of an entry's payload as a load does, and drops it. Returns bytes and
        seconds."""
        memory = np.full(min(_PROBE_BYTES, self._layout.payload_bytes(entry)), 1, np.uint8)  # the pages are there
        began = time.monotonic()
        self._read(entry, [memory])
        return len(memory), time.monotonic() - began

    def _read(self, entry: Entry, target: Sequence[Bytes]) -> Header:
        """Reads the beginning of the payload, as much as the pieces hold."""
        begin = header_bytes(entry, self._layout)
        with self._opened(entry) as descriptor:
            tasks: list[Future[None]] = []
            try:
                for offset, pieces in spans(target, _READ_BYTES):
                    tasks.append(self._readers.submit(_read_into, descriptor, begin + offset, pieces))
                header = _header(descriptor, entry.key, self._layout)
            finally:
                wait(tasks)  # they use the descriptor and the memory until then
            for task in tasks:
                task.result()
        return header

    def write(self, header: Header, payload: Sequence[Bytes]) -> None:
        """Writes the file of an entry; when this returns it is durable."""
        name = _name(header.entry.key)
        new = f"{name}.new"
        data = encode(header, self._layout)
        try:
            with _open(self._directory / new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
                _write_from(descriptor, 0, [memoryview(data)])
                for offset, pieces in spans(payload, _WRITE_BYTES):
                    _write_from(descriptor, len(data) + offset, pieces)
                os.fdatasync(descriptor)
            os.rename(self._directory / new, self._directory / name)
            with _open(self._directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
                os.fsync(descriptor)
        except OSError as error:
            with suppress(OSError):
                os.unlink(self._directory / new)
            raise _failure(error, "writing") from error

    def remove(self, key: Key) -> None:
        """Removes the file of an entry, if there is one."""
        try:
            os.unlink(self._directory / _name(key))
        except FileNotFoundError:
            return
        except OSError as error:
            raise _failure(error, "removing") from error

    def touch(self, keys: Sequence[Key], when: float) -> None:
        """Records the time of use of entries in their files; errors are ignored."""
        for key in keys:
            with suppress(OSError):  # it only orders what is read first after a restart
                os.utime(self._directory / _name(key), (when, when))

    @contextmanager
    def _opened(self, entry: Entry) -> Iterator[int]:
        """Opens the file of an entry and checks its length."""
        size = entry_bytes(entry, self._layout)
        try:
            with _open(self._directory / _name(entry.key), os.O_RDONLY) as descriptor:
                if os.fstat(descriptor).st_size != size:
                    found = os.fstat(descriptor).st_size
                    raise CopyFailed("damaged", f"the file has {found:,} bytes instead of {size:,}")
                yield descriptor
        except OSError as error:
            raise _failure(error, "reading") from error

    def _look(self, name: str) -> FoundFile | tuple[CopyFailure, str]:
        """Reads the header of a file; a file without a valid one is removed, unless a later release wrote it."""
        path = self._directory / name
        try:
            with _open(path, os.O_RDONLY) as descriptor:
                header = _header(descriptor, bytes.fromhex(name.partition(".")[0]), self._layout)
                found = os.fstat(descriptor)
            size = entry_bytes(header.entry, self._layout)
            if found.st_size != size:
                raise CopyFailed("damaged", f"the file has {found.st_size:,} bytes instead of {size:,}")
            return FoundFile(header, size, found.st_mtime)
        except OSError as error:  # tells nothing about the file: it stays, and is not used
            failure = _failure(error, "reading")
            return failure.reason, f"{name}: {failure}"
        except CopyFailed as error:
            if error.reason != "unreadable":
                with suppress(OSError):
                    os.unlink(path)
            return error.reason, f"{name}: {error}"


@contextmanager
def _open(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _name(key: Key) -> str:
    return f"{key.hex()}.entry"


def _header(descriptor: int, key: bytes, layout: Layout) -> Header:
    """Reads the header of a file; raises CopyFailed if it is not that of the entry."""
    try:
        length = header_length(os.pread(descriptor, PREFIX_BYTES, 0))
        data = bytearray(length)
        _read_into(descriptor, 0, [memoryview(data)])
        header = decode(bytes(data), layout)
    except NewerFormat as error:
        raise CopyFailed("unreadable", str(error)) from error
    except HeaderRejected as error:
        raise CopyFailed("damaged", str(error)) from error
    if header.entry.key != key:
        raise CopyFailed("damaged", "the file has the header of another entry")
    return header


def _read_into(descriptor: int, offset: int, pieces: Sequence[memoryview]) -> None:
    """Reads a file into the pieces; raises CopyFailed if it ends too early."""
    left = list(pieces)
    while left:
        done = os.preadv(descriptor, left[:_MOST_PIECES], offset)
        if not done:
            raise CopyFailed("damaged", f"the file ends at {offset:,}")
        offset += done
        left = _behind(left, done)


def _write_from(descriptor: int, offset: int, pieces: Sequence[memoryview]) -> None:
    left = list(pieces)
    while left:
        done = os.pwritev(descriptor, left[:_MOST_PIECES], offset)
        offset += done
        left = _behind(left, done)


def _behind(pieces: list[memoryview], count: int) -> list[memoryview]:
    """Pieces behind the first ``count`` bytes."""
    first = 0
    while first < len(pieces) and count >= len(pieces[first]):
        count -= len(pieces[first])
        first += 1
    left = pieces[first:]
    if count:
        left[0] = left[0][count:]
    return left


def _failure(error: OSError, what: str) -> CopyFailed:
    reason: CopyFailure = "unreadable"
    if error.errno in _FULL:
        reason = "full"
    elif isinstance(error, FileNotFoundError):
        reason = "missing"
    return CopyFailed(reason, f"{what}: {error.strerror}")


_YIELD_SECONDS = 0.01


_WARM_SECONDS = 60.0
"""Longest read of one entry while warming up; a slower one ends the warming up."""


log = structlog.get_logger(__name__)


class DiskTier(LowerTier):
    """Disk tier. Before anything is written, it measures the disk's speed and announces the entries that are there.
    Then it reads them into host memory while that has room, last used first.

    Args:
        busy: tells whether loads are in progress; the warming up yields to them.
        warm: whether the host is a tier.
    """

    def __init__(
        self,
        index: Index,
        files: DiskFiles,
        fetcher: Fetcher,
        events: EventStream,
        failures: FailureLog,
        failed: Callable[[Key, Tier], None],
        bandwidth: Bandwidth,
        *,
        busy: Callable[[], bool],
        warm: bool,
    ) -> None:
        super().__init__(Tier.DISK, index, files, fetcher, events, failures, failed)
        self._files = files
        self._bandwidth = bandwidth
        self._busy = busy
        self._warm = warm
        self._stopping = threading.Event()
        self.warmer = Worker("tiers-warm")
        self.worker.put(self._scan, rank=FIRST_RANK)

    def touch(self, keys: Sequence[Key]) -> None:
        """Records a use of entries, for the order after the next start."""
        now = time.time()
        self.worker.put(lambda: self._files.touch(keys, now), rank=TOUCH_RANK)

    def stop_warming(self) -> None:
        self._stopping.set()

    def _scan(self) -> None:
        began = time.monotonic()
        try:
            found, wrong = self._files.scan()
        except CopyFailed as error:
            self._failures.record(Tier.DISK, error.reason, str(error))
            return
        for reason, message in wrong:
            self._failures.record(Tier.DISK, reason, message)
        if found:
            self._probe(max(found, key=lambda file: file.used))
        kept = self._keep(found)
        with self._index.lock:
            limit = self._index.usage[Tier.DISK].limit
            while self.size > limit and self._index.evict(Tier.DISK, None):
                pass
        self._erase()
        log.info(
            "tier_disk_read",
            entries=len(kept),
            gib=round(self.size / 2**30, 2),
            removed=len(wrong) + len(found) - len(kept),
            seconds=round(time.monotonic() - began, 3),
        )
        if self._warm:
            order = sorted(kept, key=lambda pair: (-pair[0].used, pair[0].header.entry.start))
            self.warmer.put(lambda: self._warm_up([record for _, record in order]))

    def _probe(self, file: FoundFile) -> None:
        """Measures the disk's speed before any entry is announced."""
        try:
            size, seconds = self._files.probe(file.header.entry)
        except CopyFailed as error:  # whoever loads it will fail, too, and drop it
            self._failures.record(Tier.DISK, error.reason, str(error))
            return
        self._bandwidth.measured(Tier.DISK, size, seconds)
        log.info("tier_disk_probed", mib=round(size / 2**20, 1), seconds=round(seconds, 4))

    def _keep(self, found: Sequence[FoundFile]) -> list[tuple[FoundFile, Record]]:
        """Announces the files whose parents are there; the others are removed."""
        kept: list[tuple[FoundFile, Record]] = []
        for file in sorted(found, key=lambda file: file.header.entry.start):
            entry = file.header.entry
            with self._index.lock:
                parent = None if entry.parent is None else self._index.find(entry.parent)
                whole = entry.parent is None or (parent is not None and Tier.DISK in parent.tiers)
                record = self._index.expect(entry) if whole else None
                if record is None:
                    self.erase(entry.key)
                else:
                    record.uses = max(1, record.uses)
                    self._index.keep(record, Tier.DISK, file.size)
                    self._index.unclaim(record)
                    kept.append((file, record))
            if record is None:
                self._failures.record(Tier.DISK, "missing", "a file whose parent entry is missing")
        return kept

    def _warm_up(self, records: Sequence[Record]) -> None:
        began, count = time.monotonic(), 0
        for record in records:
            while self._busy() and not self._stopping.wait(_YIELD_SECONDS):
                pass
            if self._stopping.is_set() or not self._fetcher.warm(record, time.monotonic() + _WARM_SECONDS):
                break
            count += 1
        log.info("tier_host_warm", entries=count, of=len(records), seconds=round(time.monotonic() - began, 3))
