"""Copies between device and host: loads, from wherever the copies are, and saves."""

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
"""Of copies to the device; those from it come after."""


class _Loading:
    """A load under way. Its parts go to the device one by one, each as soon as its bytes are on the host."""

    def __init__(self, command: Load, fence: Fence) -> None:
        self.command = command
        self.fence = fence
        self.left = len(command.parts)
        self.failed: set[Key] = set()
        self.parts: list[_Part] = []
        self.began = time.monotonic()


class _Part:
    """A part of a load."""

    def __init__(self, load: _Loading, part: Part, record: Record, size: int) -> None:
        self.load = load
        self.wanted = part
        self.record = record
        self.size = size
        """Bytes that go to the device."""
        self.state: Literal["waiting", "copying", "done"] = "waiting"
        self.tier = Tier.HOST
        """Whose load it counts as."""
        self.buffer: Buffer | None = None
        """What it waits for."""
        self.began = time.monotonic()

    @property
    def filling(self) -> bool:
        """Whether its bytes are still to come from a lower tier."""
        return self.buffer is not None and self.buffer.state == "filling"


class Loads:
    """Takes loads and answers each. Thread-safe.

    Args:
        device: does the copies.
        timer: ends those that take too long.
        seconds: after which a load that still waits for bytes has failed.
        slow: told of a tier that was too slow for one.
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
        """By their load_ids, those that have not been answered."""

    @property
    def under_way(self) -> int:
        """Loads that have not been answered."""
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
        """Ends a load that nobody waits for any more, if it has not ended; it was slower than expected, and that is
        learnt."""
        with self._index.lock:
            load = self._loads.get(load_id)
            if load is None:
                return
            left = [part for part in load.parts if part.state != "done"]
            if not left:
                return
            size, seconds = sum(part.size for part in left), time.monotonic() - load.began
            slow = next((part.tier for part in left if part.filling), Tier.HOST)
            self._failures.record(slow, "late", f"{size:,} bytes of a load were not there after {seconds:.3f} s")
            # What only waits for the device has come; each copy to it is measured by itself.
            if slow is not Tier.HOST:
                self._bandwidth.late(slow, seconds)
            load.failed.update(part.record.entry.key for part in left)
            for part in left:
                # One that waits for the device finds that its load has failed when it is its turn.
                if part.state == "waiting":
                    self._finish(part, part.record.entry.key)

    def _fits(self, record: Record, part: Part) -> bool:
        blocks = record.entry.num_blocks(self._index.layout.block_size)
        return part.skip >= 0 and part.skip + len(part.blocks) <= blocks

    def _size(self, part: Part) -> int:
        layout = self._index.layout
        return len(part.blocks) * layout.block_bytes + (layout.slot_bytes if part.slot else 0)

    def _seek(self, part: _Part) -> None:
        """Looks for the bytes; the caller holds the lock."""
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
                self._failures.record(part.tier, "damaged", f"{part.size:,} bytes of an entry are not those written")
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
        """Ends a part; ``well``: None is a failure of the copy itself."""
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
        """Those that still wait for bytes have waited long enough; others may have been given up, but the tier that
        has not brought them is too slow all the same."""
        with self._index.lock:
            for part in parts:
                if part.state == "waiting" or part.filling:
                    tier = part.tier if part.buffer is None else part.buffer.origin or Tier.HOST
                    self._failures.record(tier, "slow", f"an entry did not come within {self._seconds} s")
                    self._slow(tier)
                    if part.state == "waiting":
                        self._finish(part, part.record.entry.key)

    def _close(self, parts: Sequence[_Part]) -> None:
        """The engine stops."""
        with self._index.lock:
            for part in parts:
                if part.state == "waiting":
                    self._finish(part, part.record.entry.key)

    def _finish(self, part: _Part, failed: Key | None) -> None:
        part.state = "done"
        self._end(part.load, failed)

    def _end(self, load: _Loading, failed: Key | None) -> None:
        """One part less."""
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
                self._failures.record(Tier.HOST, "missing", "an entry came before the one that it stands on")
                self._send_event(Released(command.entry.key))
                return
            expected = record
        self._device.put(
            lambda: self._save(command, fence, expected),
            rank=SAVE_RANK,
            failed=lambda: self._end(command, expected, None),
        )

    def _is_there(self, record: Record) -> bool:
        """Whether there is nothing to save."""
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
