"""TierManager: all tiers below the device, put together, and their configuration."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.common.storage.object_store import ObjectStore
from services.engine.kv_cache.block_pool import IntegrityError
from services.engine.kv_cache.keys import Key, Tier
from services.engine.kv_offload.background_copies import WRITE_RANK, Fetcher, LowerTier, PersistTracker, Source
from services.engine.kv_offload.disk import DiskFiles, DiskTier
from services.engine.kv_offload.export import EntryExchange
from services.engine.kv_offload.host_copies import Loads, Saves
from services.engine.kv_offload.host_memory import HostArena
from services.engine.kv_offload.index import Buffer, Index, Record
from services.engine.kv_offload.messages import (
    CacheTransfer,
    Entry,
    Fence,
    Forget,
    GiveUp,
    Layout,
    Load,
    Loaded,
    Persist,
    Persisted,
    Pin,
    Released,
    Save,
    Stored,
    TierCommand,
    TierEvent,
    Use,
)
from services.engine.kv_offload.object_store import StoreObjects, StoreTier
from services.engine.kv_offload.worker import Bandwidth, FailureLog, Worker, wait_all_idle
from services.engine.observability.events import EventStream
from services.engine.observability.status import TierStatus

_MOMENT = 0.002
_SETTLE_SECONDS = 60.0
"""Longest wait for the device's copies to end when no new ones begin; waits for bytes have ended by then."""
_END_SECONDS = 2.0
"""Longest wait for the threads to end, beyond the time for closing."""

log = structlog.get_logger(__name__)


class TierManager:
    """All tiers below the device, as the loop thread uses them. No method that the loop calls blocks, except
    ``settle``. The tiers' threads do the work; a failure is a miss, counted and logged.

    Args:
        wake: called on any thread when there are events; it must not block.
        store: object store, used if the configuration has a store tier.

    Raises:
        DirectoryInUse: the disk's directory cannot be used.
    """

    def __init__(
        self,
        transfer: CacheTransfer,
        limits: TierConfig,
        events: EventStream,
        wake: Callable[[], None],
        store: ObjectStore | None = None,
    ) -> None:
        self._transfer = transfer
        self._wake = wake
        self._closed = False
        self._events: deque[TierEvent] = deque()
        self._layout = transfer.layout
        sizes = {}
        arena = HostArena(transfer.host_memory(limits.host_bytes), self._layout.block_bytes)
        self._files = None if limits.disk_dir is None else DiskFiles(limits.disk_dir, self._layout)
        self._objects = None
        if limits.store and store is not None:
            self._objects = StoreObjects(store, self._layout)
        if limits.host:
            sizes[Tier.HOST] = arena.limit
        sources: dict[Tier, Source] = {}
        if self._files is not None:
            sizes[Tier.DISK] = limits.disk_bytes
            sources[Tier.DISK] = self._files
        if self._objects is not None:
            sizes[Tier.STORE] = limits.store_bytes
            sources[Tier.STORE] = self._objects
        failures = FailureLog(events)
        self._bandwidth = Bandwidth(limits.host_rate)
        self._index = Index(
            self._layout,
            arena,
            sizes,
            events,
            send_event=self._send_event,
            erase=lambda tier, key: self._lower[tier].erase(key),
            price=self._bandwidth.price,
        )
        self._persist_tracker = PersistTracker(tuple(sizes), self._send_event)
        self._index.gone.append(self._persist_tracker.gone)
        self._index.known.append(self._known)
        self._commands, self._device = Worker("tiers-jobs"), Worker("tiers-device")
        self._fetcher = Fetcher(self._index, sources, self._bandwidth, failures)
        self._loads = Loads(
            self._index,
            transfer,
            self._fetcher,
            self._bandwidth,
            events,
            failures,
            device=self._device,
            timer=self._commands,
            seconds=limits.load_seconds,
            send_event=self._send_event,
            slow=self._slow,
        )
        self._saves = Saves(
            self._index, transfer, events, failures, device=self._device, send_event=self._send_event, saved=self._saved
        )
        self._exchange = EntryExchange(self._index, self._fetcher, self._saved)
        parts = (self._fetcher, events, failures, self._persist_tracker.failed)
        self._disk = self._store = None
        if self._files is not None:
            self._disk = DiskTier(
                self._index,
                self._files,
                *parts,
                self._bandwidth,
                busy=lambda: self._loads.under_way > 0,
                warm=limits.host,
            )
        if self._objects is not None:
            # Where nothing else keeps an entry until it is used, it is put there at once.
            after = limits.store_after_uses if limits.host or self._disk is not None else 0
            self._store = StoreTier(
                self._index, self._objects, *parts, poll_seconds=limits.store_poll_seconds, after_uses=after
            )
        self._lower: Mapping[Tier, LowerTier] = {
            tier.tier: tier for tier in (self._disk, self._store) if tier is not None
        }

    def start(self) -> None:
        """Starts the threads, which first read what is on disk and in the store."""
        for worker in self._workers():
            worker.start()

    @property
    def layout(self) -> Layout:
        return self._layout

    def submit(self, commands: Sequence[TierCommand]) -> None:
        """Takes commands that may begin when the steps that have been launched so far are done."""
        copies = any(isinstance(command, Save | Load) for command in commands)
        fence = self._transfer.fence() if copies else None
        self._commands.put(lambda: self._take(commands, fence), failed=lambda: self._refuse(commands))

    def take_events(self) -> list[TierEvent]:
        """Events since the last call; ``wake`` was called for each."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def seconds(self, tier: Tier, size: int) -> float:
        """Seconds that a load of so many bytes takes from a tier, by recent measurements, with the wait for loads in
        progress; infinite while the store is backed off."""
        if tier is Tier.STORE and self._objects is not None and self._objects.pause:
            return math.inf
        return self._bandwidth.seconds(tier, size)

    def settle(self, seconds: float = _SETTLE_SECONDS) -> None:
        """Waits until no copy from or to the device is in progress; a load that waits for bytes fails before long.

        Raises:
            IntegrityError: a copy is still in progress after ``seconds``.
        """
        until = time.monotonic() + seconds
        while self._loads.under_way or not (self._commands.wait_idle(0.0) and self._device.wait_idle(0.0)):
            if time.monotonic() >= until:
                raise IntegrityError(
                    f"the tiers still copy after {seconds:g} s, {self._loads.under_way} loads among it: the device's "
                    "memory cannot be reused"
                )
            time.sleep(_MOMENT)

    def resend_all(self) -> None:
        """Sends Stored of every copy again, parents first, to a new scheduler."""
        with self._index.lock:
            for record in sorted(self._index.records(), key=lambda record: record.entry.start):
                for tier in sorted(record.tiers, key=lambda tier: tier.value):
                    self._send_event(Stored(record.entry, tier))

    def export_entry(self, key: Key) -> Iterator[bytes]:
        """See EntryExchange.export_entry."""
        return self._exchange.export_entry(key)

    def import_entry(self, pieces: Iterable[bytes]) -> Entry:
        """See EntryExchange.import_entry."""
        return self._exchange.import_entry(pieces)

    def status(self) -> dict[Tier, TierStatus]:
        """Status of every tier."""
        with self._index.lock:
            return self._index.status()

    def check(self) -> None:
        """Raises IntegrityError if memory is leaked or the index contradicts itself."""
        with self._index.lock:
            self._index.check()

    def wait_idle(self, seconds: float) -> bool:
        """Waits until all submitted commands are done, in the lower tiers as well; False: they are not in this time."""
        return wait_all_idle(self._workers(), time.monotonic() + seconds)

    def close(self, seconds: float) -> None:
        """Answers every command and ends the threads. As far as the time allows, pinned entries are copied to disk
        and store, and what waits for the disk is written."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + seconds
        if self._disk is not None:
            self._disk.stop_warming()
        self._commands.wait_idle(until)
        self._commands.close(until)
        self._device.wait_idle(until)
        now = time.monotonic()
        with self._index.lock:
            pinned = [record for record in self._index.records() if record.pinned_until > now]
            for record in sorted(pinned, key=lambda record: record.entry.start):
                for tier in self._lower.values():
                    tier.want(record, forced=True)
        if self._store is not None:
            self._store.worker.cancel(WRITE_RANK)
        for tier in self._lower.values():
            wait_all_idle(tier.workers, until)
        end = max(until, time.monotonic()) + _END_SECONDS
        ended = [worker.close(end) for worker in self._workers()]
        if not all(ended):
            log.warning("tier_threads_left", hanging=len(ended) - sum(ended))
        if self._objects is not None:
            self._objects.close()
        if self._files is not None and all(ended):
            self._files.close()
        if all(ended):
            self._transfer.close()

    def _workers(self) -> list[Worker]:
        workers = [self._commands, self._device, self._fetcher.worker]
        workers += [worker for tier in self._lower.values() for worker in tier.workers]
        if self._disk is not None:
            workers.append(self._disk.warmer)
        if self._store is not None:
            workers.append(self._store.poller)
        return workers

    def _send_event(self, event: TierEvent) -> None:
        self._events.append(event)
        if isinstance(event, Stored):
            self._persist_tracker.kept(event.entry.key, event.tier)
        self._wake()

    def _take(self, commands: Sequence[TierCommand], fence: Fence) -> None:
        # All under one lock: making room for the first save must not evict the parent of the last one.
        with self._index.lock:
            for command in commands:
                try:
                    self._begin(command, fence)
                except Exception:
                    log.exception("tier_job_failed", command=type(command).__name__)
                    self._refuse([command])

    def _begin(self, command: TierCommand, fence: Fence) -> None:
        match command:
            case Save():
                self._saves.begin(command, fence)
            case Load():
                self._loads.begin(command, fence)
            case GiveUp():
                self._loads.give_up(command.load_id)
            case Persist():
                self._persist(command)
            case Use():
                self._use(command)
            case Pin():
                with self._index.lock:
                    for record in self._found(command.keys):
                        self._index.pin(record, command.until)
            case Forget():
                with self._index.lock:
                    for record in self._found(command.keys):
                        self._index.forget(record)
                    if self._store is not None:
                        self._store.forget(command.keys)

    def _found(self, keys: Iterable[Key]) -> Iterator[Record]:
        for key in keys:
            record = self._index.find(key)
            if record is not None:
                yield record

    def _use(self, command: Use) -> None:
        with self._index.lock:
            for record in self._found(command.keys):
                self._index.use(record)
                if self._store is not None and record.tiers:
                    self._store.consider(record)
        if self._disk is not None:
            self._disk.touch(command.keys)

    def _persist(self, command: Persist) -> None:
        """Begins a Persist. The host counts as durable only if there is no other tier."""
        with self._index.lock:
            targets = tuple(self._lower) or (Tier.HOST,)
            wanted, missing = [], []
            for key in command.keys:
                record = self._index.find(key)
                for tier in targets:
                    if record is None or (tier is Tier.HOST and not record.claims and tier not in record.tiers):
                        missing.append((key, tier))
                    elif tier not in record.tiers:
                        wanted.append((key, tier))
            self._persist_tracker.begin(command.persist_id, wanted, missing)
            for record in self._found(command.keys):
                record.persisted = True
                if record.tiers:  # otherwise a save of it is in progress
                    for lower in self._lower.values():
                        lower.want(record, forced=True)

    def _known(self, record: Record) -> None:
        """Copies an entry that has its first copy to the other tiers, if a Persist asked for that meanwhile."""
        if record.persisted:
            for lower in self._lower.values():
                lower.want(record, forced=True)

    def _saved(self, record: Record, buffer: Buffer) -> None:
        """Copies an entry whose bytes are in the arena to the lower tiers."""
        given = None if buffer.kept else buffer
        if self._disk is not None:
            self._disk.want(record, forced=record.persisted, buffer=given)
        if self._store is not None and record.persisted:
            self._store.want(record, forced=True, buffer=given)
        elif self._store is not None:
            self._store.consider(record, given)

    def _slow(self, tier: Tier) -> None:
        if tier is Tier.STORE and self._objects is not None:
            self._objects.failed()

    def _refuse(self, commands: Sequence[TierCommand]) -> None:
        """Answers commands that will not be done."""
        for command in commands:
            if isinstance(command, Save):
                self._send_event(Released(command.entry.key))
            elif isinstance(command, Load):
                self._send_event(Loaded(command.load_id, tuple(part.key for part in command.parts)))
            elif isinstance(command, Persist):
                targets = tuple(self._lower) or (Tier.HOST,)
                self._send_event(
                    Persisted(command.persist_id, tuple((key, tier) for key in command.keys for tier in targets))
                )


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Configuration of an engine's tiers."""

    host: bool
    """True if the host keeps copies; otherwise its memory is only a buffer for the other tiers."""
    host_bytes: int
    host_rate: float
    """First estimate of the bytes a second between host and device."""
    load_seconds: float
    """Time after which a load that still waits for bytes fails."""
    disk_dir: Path | None = None
    """Directory of the disk tier; None: there is no disk tier."""
    disk_bytes: int = 0
    store: bool = False
    store_bytes: int = 0
    store_poll_seconds: float = 30.0
    store_after_uses: int = 1
