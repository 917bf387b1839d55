"""Saves: from the device to the host."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from services.engine.kv_cache.keys import Tier
from services.engine.kv_offload.copies.index import Index
from services.engine.kv_offload.copies.records import Buffer, Record
from services.engine.kv_offload.failures import FailureLog
from services.engine.kv_offload.messages import CacheTransfer, Event, Fence, Released, Save
from services.engine.kv_offload.worker import Worker
from services.engine.observability.events import CopySaved, EventStream

SAVE_RANK = 1
"""Of copies from the device: a load does not wait behind them."""


class Saves:
    """Takes saves and answers each with Released. Thread-safe.

    An entry that some tier has already is not saved again. One whose predecessor no tier has is given up, as is one
    that finds no room.

    Args:
        saved: told of an entry whose bytes are in the arena; it takes them further down.
    """

    def __init__(
        self,
        index: Index,
        transfer: CacheTransfer,
        events: EventStream,
        failures: FailureLog,
        *,
        device: Worker,
        tell: Callable[[Event], None],
        saved: Callable[[Record, Buffer], None],
    ) -> None:
        self._index = index
        self._transfer = transfer
        self._events = events
        self._failures = failures
        self._device = device
        self._tell = tell
        self._saved = saved

    def begin(self, job: Save, fence: Fence) -> None:
        """Starts a save."""
        with self._index.lock:
            known = self._index.find(job.entry.key)
            if known is not None and self._is_there(known):
                self._tell(Released(job.entry.key))
                return
            record = self._index.expect(job.entry)
            if record is None:
                self._failures.tell(Tier.HOST, "missing", "an entry came before the one that it stands on")
                self._tell(Released(job.entry.key))
                return
            expected = record
        self._device.put(
            lambda: self._save(job, fence, expected), rank=SAVE_RANK, failed=lambda: self._end(job, expected, None)
        )

    def _is_there(self, record: Record) -> bool:
        """Whether there is nothing to save."""
        return record.buffer is not None or bool(record.tiers - {Tier.HOST})

    def _save(self, job: Save, fence: Fence, record: Record) -> None:
        entry, index = job.entry, self._index
        size = index.layout.payload_bytes(entry)
        with index.lock:
            if not index.stands(record) or self._is_there(record):
                self._end(job, record, None)
                return
            run = index.take_room(size)
            if run is None:
                self._failures.tell(Tier.HOST, "full", f"no room for {size:,} bytes of an entry")
                self._end(job, record, None)
                return
            buffer = index.new_buffer(record)
            buffer.run = run
        try:
            began = time.monotonic()
            sums = self._transfer.save(job.blocks, job.slot, index.arena.pieces(run), fence)
            seconds = time.monotonic() - began
        except BaseException:
            with index.lock:
                index.failed(record, buffer)
            self._failures.tell(Tier.HOST, "unreadable", f"copying {size:,} bytes from the device failed")
            raise
        with index.lock:
            index.ready(record, buffer, np.array(sums, np.int64), None)
            self._end(job, record, buffer)
        self._events.emit(CopySaved(Tier.HOST, size, seconds))

    def _end(self, job: Save, record: Record, buffer: Buffer | None) -> None:
        with self._index.lock:
            self._tell(Released(job.entry.key))
            if buffer is not None:
                if self._index.is_live(record):
                    self._saved(record, buffer)
                self._index.release(record, buffer)
            self._index.unclaim(record)
