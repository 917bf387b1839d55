"""The disk: entries as files of one directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import structlog

from services.engine.kv_cache.keys import Key, Tier
from services.engine.kv_offload.copies.background import FIRST_RANK, TOUCH_RANK, LowerTier
from services.engine.kv_offload.copies.bandwidth import Bandwidth
from services.engine.kv_offload.copies.fetcher import Fetcher
from services.engine.kv_offload.copies.index import Index
from services.engine.kv_offload.copies.records import Record
from services.engine.kv_offload.disk.files import DiskFiles, FoundFile
from services.engine.kv_offload.failures import CopyFailed, FailureLog
from services.engine.kv_offload.worker import Worker
from services.engine.observability.events import EventStream

_YIELD_SECONDS = 0.01
_WARM_SECONDS = 60.0
"""How long one entry may take; then the disk is not there for warming up."""

log = structlog.get_logger(__name__)


class DiskTier(LowerTier):
    """Before anything is written, the disk's speed is measured, and what is there is told. Then it is read into the
    host's memory as long as that has room, last used first.

    Args:
        busy: whether loads are under way, to which the warming up yields.
        warm: the host is a tier.
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
        """Notes a use of entries, for the next start."""
        now = time.time()
        self.worker.put(lambda: self._files.touch(keys, now), rank=TOUCH_RANK)

    def stop_warming(self) -> None:
        self._stopping.set()

    def _scan(self) -> None:
        began = time.monotonic()
        try:
            found, wrong = self._files.scan()
        except CopyFailed as error:
            self._failures.tell(Tier.DISK, error.reason, str(error))
            return
        for reason, message in wrong:
            self._failures.tell(Tier.DISK, reason, message)
        if found:
            self._probe(max(found, key=lambda file: file.used))
        kept = self._keep(found)
        with self._index.lock:
            limit = self._index.books[Tier.DISK].limit
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
        """Learns how fast the disk is, before anybody is told of anything that could be loaded."""
        try:
            size, seconds = self._files.probe(file.header.entry)
        except CopyFailed as error:  # whoever loads it will see, too, and drop it
            self._failures.tell(Tier.DISK, error.reason, str(error))
            return
        self._bandwidth.measured(Tier.DISK, size, seconds)
        log.info("tier_disk_probed", mib=round(size / 2**20, 1), seconds=round(seconds, 4))

    def _keep(self, found: Sequence[FoundFile]) -> list[tuple[FoundFile, Record]]:
        """Tells the files that have their chain; the others are removed."""
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
                self._failures.tell(Tier.DISK, "missing", "a file without the one that it stands on")
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
