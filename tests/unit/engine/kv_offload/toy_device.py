"""A device for tests of the tiers: caches in numpy arrays, real copies, real checksums."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from services.engine.kv_cache.keys import Key, Namespace, Tier
from services.engine.kv_offload.entry_format import WORD, checksum, weights
from services.engine.kv_offload.manager import TierConfig, TierManager
from services.engine.kv_offload.messages import (
    Bytes,
    Entry,
    Fence,
    Layout,
    Load,
    Loaded,
    Part,
    Persisted,
    Save,
    TierCommand,
    TierEvent,
)
from services.engine.observability.events import (
    CopyEvicted,
    CopyFailure,
    CopyLoaded,
    CopyNotMade,
    CopySaved,
    EngineEvent,
    EventStream,
)

LAYOUT = Layout("toy", block_size=4, block_bytes=1000, slot_bytes=5000)
LARGE = Layout("large", block_size=4, block_bytes=40_000, slot_bytes=400_000)
SPACE = Namespace(b"s" * 20)


class ToyDevice:
    """Implements CacheTransfer."""

    def __init__(self, layout: Layout = LAYOUT, blocks: int = 64, slots: int = 8) -> None:
        self._layout = layout
        self.blocks = np.zeros((blocks, layout.block_bytes), np.uint8)
        self.slots = np.zeros((slots, layout.slot_bytes), np.uint8)
        self._weights = weights(max(layout.block_bytes, layout.slot_bytes) // WORD)
        self.before_save: Callable[[], None] = lambda: None
        self.before_load: Callable[[], None] = lambda: None
        self._threads: set[int] = set()

    @property
    def layout(self) -> Layout:
        return self._layout

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def close(self) -> None:
        """Frees nothing: numpy owns the memory."""

    def fence(self) -> Fence:
        return None

    def host_memory(self, size: int) -> Bytes:
        return np.zeros(size, np.uint8)

    def save(self, blocks: Sequence[int], slot: int, target: Sequence[Bytes], after: Fence) -> Sequence[int]:
        self._only_one_thread()
        self.before_save()
        data = np.concatenate([self.blocks[block] for block in blocks] + ([self.slots[slot]] if slot else []))
        assert sum(map(len, target)) == len(data)
        for piece in target:
            piece[:] = data[: len(piece)]
            data = data[len(piece) :]
        return self._sums(blocks, slot)

    def load(self, source: Sequence[Bytes], blocks: Sequence[int], slot: int, after: Fence) -> Sequence[int]:
        self._only_one_thread()
        self.before_load()
        data = np.concatenate(source) if source else np.empty(0, np.uint8)
        size = self._layout.block_bytes
        assert len(data) == len(blocks) * size + (self._layout.slot_bytes if slot else 0)
        for number, block in enumerate(blocks):
            self.blocks[block] = data[number * size : (number + 1) * size]
        if slot:
            self.slots[slot] = data[len(blocks) * size :]
        return self._sums(blocks, slot)

    def _sums(self, blocks: Sequence[int], slot: int) -> list[int]:
        sums = [checksum(self.blocks[block], self._weights) for block in blocks]
        return [*sums, checksum(self.slots[slot], self._weights)] if slot else sums

    def _only_one_thread(self) -> None:
        self._threads.add(threading.get_ident())
        assert len(self._threads) == 1


class Counts:
    """Counts of the events of tiers."""

    def __init__(self) -> None:
        self.troubles: Counter[tuple[Tier, CopyFailure]] = Counter()
        self.loaded: Counter[Tier] = Counter()
        self.saved: Counter[Tier] = Counter()
        self.evicted: Counter[Tier | None] = Counter()

    def listen(self, event: EngineEvent) -> None:
        match event:
            case CopyLoaded(tier, size):
                self.loaded[tier] += size
            case CopySaved(tier, size):
                self.saved[tier] += size
            case CopyNotMade(tier, reason):
                self.troubles[tier, reason] += 1
            case CopyEvicted(tier, size):
                self.evicted[tier] += size
            case _:
                raise AssertionError(f"tiers do not tell of {event}")


def chain(*lengths: int, seed: int = 0, namespace: Namespace = SPACE, seconds: float = 1.0) -> list[Entry]:
    """A history in entries of so many tokens."""
    entries: list[Entry] = []
    for number, length in enumerate(lengths):
        tokens = np.arange(length, dtype="<u4") + 1000 * number + 100_000 * seed
        entries.append(Entry.behind(entries[-1] if entries else None, namespace, tokens.tobytes(), seconds))
    return entries


def content(entry: Entry, layout: Layout = LAYOUT) -> tuple[Bytes, Bytes]:
    """[blocks, block_bytes] and [slot_bytes]: what is computed for an entry, always the same."""
    random = np.random.default_rng(list(entry.key))
    count = entry.num_blocks(layout.block_size)
    return (
        random.integers(0, 256, (count, layout.block_bytes), np.uint8),
        random.integers(0, 256, layout.slot_bytes, np.uint8),
    )


def limits(pages: int = 40, **changes: object) -> TierConfig:
    """``pages``: of the host's memory, 4 KiB each in the toy layout."""
    values: dict[str, object] = {
        "host": True,
        "host_bytes": pages * 4096,
        "host_rate": 5e9,
        "load_seconds": 5.0,
        "disk_bytes": 10**9,
        "store_bytes": 10**9,
        "store_poll_seconds": 0.1,
    }
    return TierConfig(**(values | changes))  # type: ignore[arg-type]


class Bench:
    """A manager on a toy device, and what its events say."""

    def __init__(
        self, limit: TierConfig | None = None, store: object = None, layout: Layout = LAYOUT, start: bool = True
    ) -> None:
        self.device = ToyDevice(layout)
        self.layout = layout
        self.counts = Counts()
        self.woken = threading.Event()
        events = EventStream(self.counts.listen)
        self.manager = TierManager(self.device, limit or limits(), events, self.woken.set, store)  # type: ignore[arg-type]
        self.events: list[TierEvent] = []
        self._last_id = 0
        if start:
            self.manager.start()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self, seconds: float = 10.0) -> list[TierEvent]:
        self.manager.close(seconds)
        return self.take()

    def take(self) -> list[TierEvent]:
        """The events since the last call."""
        new = self.manager.take_events()
        self.events += new
        return new

    def settle(self) -> list[TierEvent]:
        """Waits until nothing is to do; the events until then."""
        assert self.manager.wait_idle(20)
        self.manager.check()
        return self.take()

    def submit(self, *jobs: TierCommand) -> None:
        self.manager.submit(jobs)

    def put(self, entry: Entry, first_block: int = 1, slot: int = 1) -> Save:
        """Computes an entry on the device; the job that saves it."""
        blocks, state = content(entry, self.layout)
        self.device.blocks[first_block : first_block + len(blocks)] = blocks
        self.device.slots[slot] = state
        return Save(entry, range(first_block, first_block + len(blocks)), slot)

    def save(self, *entries: Entry) -> list[TierEvent]:
        """Computes and saves each, and waits."""
        events = []
        for entry in entries:
            self.submit(self.put(entry))
            events += self.settle()
        return events

    def load(self, *entries: Entry, skip: int = 0, wait: bool = True) -> Loaded | None:
        """Loads entries one behind the other, the first without ``skip`` blocks; the last one's state as well. What
        comes is compared with what was computed, unless the load has failed."""
        self._last_id += 1
        self.device.blocks[:] = 0
        self.device.slots[:] = 0
        parts, place = [], 1
        for entry in entries:
            count = entry.num_blocks(self.layout.block_size) - skip
            slot = 2 if entry is entries[-1] else 0
            parts.append(Part(entry.key, skip, range(place, place + count), slot))
            place, skip = place + count, 0
        self.submit(Load(self._last_id, parts))
        if not wait:
            return None
        loaded = self.wait_loaded(self._last_id)
        if not loaded.failed:
            for entry, part in zip(entries, parts, strict=True):
                blocks, state = content(entry, self.layout)
                assert np.array_equal(self.device.blocks[list(part.blocks)], blocks[part.skip :])
                if part.slot:
                    assert np.array_equal(self.device.slots[part.slot], state)
        return loaded

    def wait_loaded(self, load_id: int, seconds: float = 20.0) -> Loaded:
        return next(event for event in self.wait_for(Loaded, seconds, load_id) if isinstance(event, Loaded))

    def wait_for(self, kind: type, seconds: float, number: int) -> list[TierEvent]:
        until = time.monotonic() + seconds
        while True:
            self.woken.clear()
            self.take()
            found = [event for event in self.events if isinstance(event, kind) and number_of(event) == number]
            if found:
                return found
            assert time.monotonic() < until, f"no {kind.__name__} of {number}"
            self.woken.wait(0.2)


def number_of(event: TierEvent) -> int | None:
    """Number of the load or persist that an event ends; None: it ends neither."""
    match event:
        case Loaded():
            return event.load_id
        case Persisted():
            return event.persist_id
    return None


def keys(entries: Sequence[Entry]) -> tuple[Key, ...]:
    return tuple(entry.key for entry in entries)


def files(directory: Path) -> dict[str, int]:
    """Name and size of every entry's file."""
    return {path.name: path.stat().st_size for path in directory.iterdir() if path.name != "lock"}
