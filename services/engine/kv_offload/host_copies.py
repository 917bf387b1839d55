"""Copies between device and host: loads, from whichever tier has the entries, and saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from services.engine.kv_cache.keys import Key, Tier
from services.engine.kv_offload.background_copies import Fetcher
from services.engine.kv_offload.index import Buffer, Index, Record
from services.engine.kv_offload.messages import (
    Bytes,
    CacheTransfer,
    Fence,
    Load,
    Loaded,
    Part,
    Released,
    Save,
    TierEvent,
)
from services.engine.kv_offload.worker import Bandwidth, FailureLog, Worker
from services.engine.observability.events import CopyLoaded, CopySaved, EventStream

LOAD_RANK = 0
"""Rank of copies to the device; those from it come after."""


class _Loading:
    """Load in progress. Its parts go to the device one by one, each as soon as its bytes are on the host."""

    def __init__(self, command: Load, fence: Fence) -> None:
        self.command = command
        self.fence = fence
        self.left = len(command.parts)
        self.failed: set[Key] = set()
        self.parts: list[_Part] = []
        self.began = time.monotonic()


class _Part:
    """Part of a load: one entry."""

    def __init__(self, load: _Loading, part: Part, record: Record, size: int) -> None:
        self.load = load
        self.wanted = part
        self.record = record
        self.size = size
        """Bytes that go to the device."""
        self.state: Literal["waiting", "copying", "done"] = "waiting"
        self.tier = Tier.HOST
        """Tier that the load is counted for."""
        self.buffer: Buffer | None = None
        """Buffer that it waits for or copies from."""
        self.began = time.monotonic()

    @property
    def filling(self) -> bool:
        """True while its bytes are still coming from a lower tier."""
        return self.buffer is not None and self.buffer.state == "filling"


class Loads:
    """Runs loads and answers each with Loaded. Thread-safe.

    Args:
        device: worker that does the copies.
        timer: worker that ends loads that take too long.
        seconds: time after which a load that still waits for bytes fails.
        slow: called with a tier that was too slow for a load.
    """

    def __init__(
        self,
        index: Index,
        transfer: CacheTransfer,
        fetcher: Fetcher,
        bandwidth: Bandwidth,
        events: EventStream,
        failures: FailureLog,
        *,
        device: Worker,
        timer: Worker,
        seconds: float,
        send_event: Callable[[TierEvent], None],
        slow: Callable[[Tier], None],
    ) -> None:
        self._index = index
        self._transfer = transfer
        self._fetcher = fetcher
        self._bandwidth = bandwidth
        self._events = events
        self._failures = failures
        self._device = device
        self._timer = timer
        self._seconds = seconds
        self._send_event = send_event
        self._slow = slow
        self._loads: dict[int, _Loading] = {}
        """Loads that have not been answered, by number."""

    @property
    def under_way(self) -> int:
        """Number of loads that have not been answered."""
        return len(self._loads)

    def begin(self, command: Load, fence: Fence) -> None:
        """Starts a load."""
        load = _Loading(command, fence)
        with self._index.lock:
            self._loads[command.load_id] = load
            if not command.parts:
                self._answer(load)
                return
            for wanted in command.parts:
                record = self._index.find(wanted.key)
                if record is None or not self._fits(record, wanted):
                    self._end(load, wanted.key)
                    continue
                part = _Part(load, wanted, record, self._size(wanted))
                load.parts.append(part)
                self._seek(part)
        until = time.monotonic() + self._seconds
        self._timer.put(lambda: self._expire(load.parts), at=until, failed=lambda: self._close(load.parts))

    def give_up(self, load_id: int) -> None:
        """Ends a load that nobody waits for any more, if it has not ended. It was slower than expected, which the
        bandwidth learns."""
        with self._index.lock:
            load = self._loads.get(load_id)
            if load is None:
                return
            left = [part for part in load.parts if part.state != "done"]
            if not left:
                return
            size, seconds = sum(part.size for part in left), time.monotonic() - load.began
            slow = next((part.tier for part in left if part.filling), Tier.HOST)
            self._failures.record(slow, "late", f"{size:,} bytes of a load had not arrived after {seconds:.3f} s")
            # Parts that only wait for the device have arrived; each copy to it is measured by itself.
            if slow is not Tier.HOST:
                self._bandwidth.late(slow, seconds)
            load.failed.update(part.record.entry.key for part in left)
            for part in left:
                # A part that waits for the device notices in its turn that its load has failed.
                if part.state == "waiting":
                    self._finish(part, part.record.entry.key)

    def _fits(self, record: Record, part: Part) -> bool:
        blocks = record.entry.num_blocks(self._index.layout.block_size)
        return part.skip >= 0 and part.skip + len(part.blocks) <= blocks

    def _size(self, part: Part) -> int:
        layout = self._index.layout
        return len(part.blocks) * layout.block_bytes + (layout.slot_bytes if part.slot else 0)

    def _seek(self, part: _Part) -> None:
        """Finds the bytes of a part or begins to fetch them; the caller holds the lock."""
        record, buffer = part.record, part.record.buffer
        if part.load.failed:
            self._finish(part, None)
            return
        if buffer is None:
            if not record.tiers or not self._index.is_live(record):
                self._finish(part, record.entry.key)
                return
            buffer = self._fetcher.begin(record, part.began + self._seconds)
        buffer.readers += 1
        part.buffer = buffer
        if buffer.state == "filling":
            part.state = "waiting"
            part.tier = buffer.origin or Tier.HOST
            self._bandwidth.begin(part.tier, part.size)
            buffer.waiters.append(lambda there: self._arrived(part, buffer, there))
        else:
            part.tier = Tier.HOST
            self._bandwidth.begin(Tier.HOST, part.size)
            self._to_device(part, buffer)

    def _arrived(self, part: _Part, buffer: Buffer, there: bool) -> None:
        self._bandwidth.end(part.tier, part.size)
        if part.state == "done" or not there:
            self._index.release(part.record, buffer)
            if part.state != "done":
                self._finish(part, part.record.entry.key)
            return
        part.tier = buffer.origin or Tier.HOST
        self._bandwidth.begin(Tier.HOST, part.size)
        self._to_device(part, buffer)

    def _to_device(self, part: _Part, buffer: Buffer) -> None:
        part.state = "copying"
        self._device.put(
            lambda: self._copy(part, buffer), rank=LOAD_RANK, failed=lambda: self._copied(part, buffer, None)
        )

    def _copy(self, part: _Part, buffer: Buffer) -> None:
        if part.load.failed:
            self._copied(part, buffer, False)
            return
        wanted, began = part.wanted, time.monotonic()
        found = self._transfer.load(self._source(wanted, buffer), wanted.blocks, wanted.slot, part.load.fence)
        seconds = time.monotonic() - began
        count = len(wanted.blocks)
        expected = buffer.checksums[wanted.skip : wanted.skip + count].tolist()
        if wanted.slot:
            expected.append(int(buffer.checksums[-1]))
        if list(found)[: len(expected)] == expected:
            self._bandwidth.measured(Tier.HOST, part.size, seconds)
            since = began if part.tier is Tier.HOST else part.began
            self._events.emit(CopyLoaded(part.tier, part.size, time.monotonic() - since))
            self._copied(part, buffer, True)
            return
        with self._index.lock:
            if self._index.spoil(part.record, buffer):
                self._failures.record(
                    part.tier, "damaged", f"{part.size:,} bytes of an entry differ from those written"
                )
                if part.tier is not Tier.HOST:
                    self._index.drop(part.record, part.tier)
            self._leave(part, buffer)
            self._seek(part)

    def _source(self, wanted: Part, buffer: Buffer) -> Sequence[Bytes]:
        if buffer.run is None:
            raise RuntimeError("a buffer without memory is read")
        arena, layout = self._index.arena, self._index.layout
        begin, size = wanted.skip * layout.block_bytes, len(wanted.blocks) * layout.block_bytes
        pieces = arena.pieces(buffer.run, begin, begin + size)
        if wanted.slot:
            pieces += arena.pieces(buffer.run, buffer.run.size - layout.slot_bytes)
        return pieces

    def _copied(self, part: _Part, buffer: Buffer, succeeded: bool | None) -> None:
        """Ends a part; ``succeeded`` is None if the copy itself failed."""
        with self._index.lock:
            if part.state != "copying" or part.buffer is not buffer:
                return
            self._leave(part, buffer)
            self._finish(part, part.record.entry.key if succeeded is None else None)

    def _leave(self, part: _Part, buffer: Buffer) -> None:
        self._bandwidth.end(Tier.HOST, part.size)
        self._index.release(part.record, buffer)
        part.buffer = None

    def _expire(self, parts: Sequence[_Part]) -> None:
        """Fails the parts that still wait for bytes. Parts that were given up before count as too slow for their tier
        as well."""
        with self._index.lock:
            for part in parts:
                if part.state == "waiting" or part.filling:
                    tier = part.tier if part.buffer is None else part.buffer.origin or Tier.HOST
                    self._failures.record(tier, "slow", f"an entry did not arrive within {self._seconds} s")
                    self._slow(tier)
                    if part.state == "waiting":
                        self._finish(part, part.record.entry.key)

    def _close(self, parts: Sequence[_Part]) -> None:
        """Ends waiting parts because the engine stops."""
        with self._index.lock:
            for part in parts:
                if part.state == "waiting":
                    self._finish(part, part.record.entry.key)

    def _finish(self, part: _Part, failed: Key | None) -> None:
        part.state = "done"
        self._end(part.load, failed)

    def _end(self, load: _Loading, failed: Key | None) -> None:
        """Counts the end of a part and answers the load after its last one."""
        if failed is not None:
            load.failed.add(failed)
        load.left -= 1
        if not load.left:
            self._answer(load)

    def _answer(self, load: _Loading) -> None:
        del self._loads[load.command.load_id]
        failed = dict.fromkeys(part.key for part in load.command.parts if part.key in load.failed)
        self._send_event(Loaded(load.command.load_id, tuple(failed)))


SAVE_RANK = 1
"""Rank of copies from the device: a load does not wait behind them."""


class Saves:
    """Runs saves and answers each with Released. Thread-safe.

    An entry that some tier has already is not saved again. A save is given up if no tier has the entry's parent, or if
    there is no room.

    Args:
        saved: called with an entry whose bytes are in the arena; it copies them to lower tiers.
    """

    def __init__(
        self,
        index: Index,
        transfer: CacheTransfer,
        events: EventStream,
        failures: FailureLog,
        *,
        device: Worker,
        send_event: Callable[[TierEvent], None],
        saved: Callable[[Record, Buffer], None],
    ) -> None:
        self._index = index
        self._transfer = transfer
        self._events = events
        self._failures = failures
        self._device = device
        self._send_event = send_event
        self._saved = saved

    def begin(self, command: Save, fence: Fence) -> None:
        """Starts a save."""
        with self._index.lock:
            known = self._index.find(command.entry.key)
            if known is not None and self._is_there(known):
                self._send_event(Released(command.entry.key))
                return
            record = self._index.expect(command.entry)
            if record is None:
                # The loop chose the parent before it heard that it is gone, to make room or for want of it: its event
                # is under way, and the next save begins further up. Of a parent that never was, something is wrong.
                if not self._index.came_late(command.entry):
                    self._failures.record(Tier.HOST, "missing", "an entry came before its parent")
                self._send_event(Released(command.entry.key))
                return
            expected = record
        self._device.put(
            lambda: self._save(command, fence, expected),
            rank=SAVE_RANK,
            failed=lambda: self._end(command, expected, None),
        )

    def _is_there(self, record: Record) -> bool:
        """True if a tier has the entry already, so that there is nothing to save."""
        return record.buffer is not None or bool(record.tiers - {Tier.HOST})

    def _save(self, command: Save, fence: Fence, record: Record) -> None:
        entry, index = command.entry, self._index
        size = index.layout.payload_bytes(entry)
        with index.lock:
            if not index.stands(record) or self._is_there(record):
                self._end(command, record, None)
                return
            run = index.take_room(size)
            if run is None:
                self._failures.record(Tier.HOST, "full", f"no room for {size:,} bytes of an entry")
                self._end(command, record, None)
                return
            buffer = index.new_buffer(record)
            buffer.run = run
        try:
            began = time.monotonic()
            sums = self._transfer.save(command.blocks, command.slot, index.arena.pieces(run), fence)
            seconds = time.monotonic() - began
        except BaseException:
            with index.lock:
                index.failed(record, buffer)
            self._failures.record(Tier.HOST, "unreadable", f"copying {size:,} bytes from the device failed")
            raise
        with index.lock:
            index.ready(record, buffer, np.array(sums, np.int64), None)
            self._end(command, record, buffer)
        self._events.emit(CopySaved(Tier.HOST, size, seconds))

    def _end(self, command: Save, record: Record, buffer: Buffer | None) -> None:
        with self._index.lock:
            self._send_event(Released(command.entry.key))
            if buffer is not None:
                if self._index.is_live(record):
                    self._saved(record, buffer)
                self._index.release(record, buffer)
            self._index.unclaim(record)
