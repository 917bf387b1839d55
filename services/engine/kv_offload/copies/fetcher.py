"""From the lower tiers to the host."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from services.engine.kv_cache.keys import Tier
from services.engine.kv_offload.copies.bandwidth import Bandwidth
from services.engine.kv_offload.copies.index import Index
from services.engine.kv_offload.copies.records import Buffer, Record
from services.engine.kv_offload.entry_format.header import Header
from services.engine.kv_offload.failures import CopyFailed, FailureLog
from services.engine.kv_offload.host_memory import Run
from services.engine.kv_offload.messages import Bytes, Entry
from services.engine.kv_offload.worker import Worker

_THREADS = 4
"""Entries that are read at once; each by several threads more."""


class Source(Protocol):
    """A tier that entries can be read from."""

    def read(self, entry: Entry, target: Sequence[Bytes]) -> Header:
        """Raises CopyFailed."""
        ...


class Fetcher:
    """Reads entries into the arena. Thread-safe.

    Args:
        sources: fastest first.
    """

    def __init__(
        self, index: Index, sources: Mapping[Tier, Source], bandwidth: Bandwidth, failures: FailureLog
    ) -> None:
        self._index = index
        self._sources = sources
        self._bandwidth = bandwidth
        self._failures = failures
        self._ended: dict[Tier, float] = {}
        """When the last read of each tier ended."""
        self.worker = Worker("tiers-fetch", _THREADS)

    def begin(self, record: Record, until: float, run: Run | None = None) -> Buffer:
        """A new buffer of this entry, which is going to be filled; the caller holds the index's lock.

        Args:
            until: a time of time.monotonic() after which nobody wants it any more.
            run: memory for it; without one others may have to go.
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
        """Waits until the bytes are in the arena; None: they do not get there. The caller releases the buffer."""
        with self._index.lock:
            buffer = record.buffer
            if buffer is None:
                if not any(tier in record.tiers for tier in self._sources):
                    return None
                buffer = self.begin(record, until)
            buffer.readers += 1
            return self._wait(record, buffer, until)

    def warm(self, record: Record, until: float) -> bool:
        """Waits until the bytes are in the arena, if there is room for them; False: there is none."""
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
        """Until the buffer is ready; otherwise it is released."""
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
            self._failures.tell(Tier.HOST, "full", f"no room for {size:,} bytes of an entry that is to be loaded")
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
                # Reads at the same time are served one after the other: this one's time began with the last one's end.
                began, ended = max(began, self._ended.get(tier, 0.0)), time.monotonic()
                self._ended[tier] = ended
                self._bandwidth.measured(tier, size, ended - began)
                index.ready(record, buffer, header.checksums, tier)
                index.release(record, buffer)
            return
        self._give_up(record, buffer)

    def _take_room(self, size: int, until: float) -> Run | None:
        """Waits for readers of others, if it has to."""
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
                return  # it was dropped while it was read: no wonder
            if error.reason not in ("slow", "away"):
                self._index.drop(record, tier, erase=error.reason != "missing")
        self._failures.tell(tier, error.reason, str(error))

    def _give_up(self, record: Record, buffer: Buffer) -> None:
        with self._index.lock:
            if buffer.state == "filling":
                self._index.failed(record, buffer)
