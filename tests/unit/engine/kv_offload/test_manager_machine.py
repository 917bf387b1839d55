"""The tiers under arbitrary jobs, damage and restarts: nothing leaks, limits hold, every job is answered, events tell
exactly what is there, and a load brings the bytes that were saved or fails."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from services.common.errors import NotFound, Unavailable
from services.engine.kv_cache.keys import Key, Tier
from services.engine.kv_offload.messages import (
    Entry,
    Forget,
    GiveUp,
    Load,
    Loaded,
    Part,
    Persist,
    Persisted,
    Pin,
    Released,
    Removed,
    Stored,
    TierEvent,
    Use,
)
from tests.unit.engine.kv_offload.toy_device import LAYOUT, Bench, chain, content, files, keys, limits
from tests.unit.engine.kv_offload.toy_store import ToyStore, item

_ONE, _OTHER = chain(4, 3, 8, 5, 1), chain(9, 4, 4, seed=7)
_BRANCH = Entry.behind(_ONE[1], _ONE[1].namespace, b"abcd" * 6, 0.5)
ENTRIES = [*_ONE, *_OTHER, _BRANCH, Entry.behind(_BRANCH, _BRANCH.namespace, b"efgh" * 2, 3.0)]
BY_KEY = {entry.key: entry for entry in ENTRIES}
NUMBERS = st.integers(0, len(ENTRIES) - 1)


def path_to(entry: Entry) -> list[Entry]:
    """The chain that ends with it."""
    found = [entry]
    while found[0].parent is not None:
        found.insert(0, BY_KEY[found[0].parent])
    return found


class TierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.bench: Bench | None = None
        self.kept: set[tuple[Key, Tier]] = set()
        self.saves: Counter[Key] = Counter()
        self.loads: dict[int, list[Part]] = {}
        self.persists: set[int] = set()
        self.load_id = 0
        self.place = 1

    @initialize(
        pages=st.integers(2, 14),
        disk=st.none() | st.integers(1, 8),
        host=st.booleans(),
        store=st.none() | st.integers(1, 8),
        after_uses=st.integers(0, 1),
    )
    def start(self, pages: int, disk: int | None, host: bool, store: int | None, after_uses: int) -> None:
        self.disk = disk
        self.store = None if store is None else ToyStore()
        self.limits = limits(
            pages,
            host=host or (disk is None and store is None),
            disk_dir=None if disk is None else self.directory,
            disk_bytes=12_000 * (disk or 1),
            store=store is not None,
            store_bytes=12_000 * (store or 1),
            store_after_uses=after_uses,
            store_poll_seconds=1e6,
        )
        self.open()

    def open(self) -> None:
        self.kept.clear()
        self.bench = Bench(self.limits, self.store)
        self.bench.device.blocks = np.zeros((3000, LAYOUT.block_bytes), np.uint8)
        self.bench.device.slots = np.zeros((1000, LAYOUT.slot_bytes), np.uint8)

    def take(self, count: int) -> int:
        """The first of so many blocks, and the slot, that no job before has used."""
        self.place += count
        if self.place >= 900:
            self.settle()
            self.place = 1 + count
        return self.place - count

    @rule(number=NUMBERS, whole=st.booleans())
    def save(self, number: int, whole: bool) -> None:
        jobs = []
        for entry in path_to(ENTRIES[number]) if whole else [ENTRIES[number]]:
            first = self.take(entry.num_blocks(LAYOUT.block_size) + 1)
            jobs.append(self.bench.put(entry, first, first))
            self.saves[entry.key] += 1
        self.bench.submit(*jobs)

    @rule(number=NUMBERS, skip=st.integers(0, 1), keep=st.integers(0, 3), state=st.booleans())
    def load(self, number: int, skip: int, keep: int, state: bool) -> None:
        self.load_id += 1
        parts = []
        for entry in path_to(ENTRIES[number]):
            blocks = entry.num_blocks(LAYOUT.block_size)
            wanted = max(0, blocks - skip) if entry is not ENTRIES[number] else min(keep, max(0, blocks - skip))
            first = self.take(wanted + 1)
            slot = first if entry is ENTRIES[number] and state else 0
            parts.append(Part(entry.key, min(skip, blocks), range(first, first + wanted), slot))
            skip = 0
        self.loads[self.load_id] = parts
        self.bench.submit(Load(self.load_id, parts))

    @rule(back=st.integers(0, 2))
    def give_up(self, back: int) -> None:
        """Nobody waits for a load of late, which may have ended."""
        self.bench.submit(GiveUp(self.load_id - back))

    @rule(number=NUMBERS)
    def use(self, number: int) -> None:
        self.bench.submit(Use(keys(path_to(ENTRIES[number]))))

    @rule(number=NUMBERS, seconds=st.sampled_from([0.0, 0.01, 60.0]))
    def pin(self, number: int, seconds: float) -> None:
        self.bench.submit(Pin(keys(path_to(ENTRIES[number])), time.monotonic() + seconds if seconds else 0.0))

    @rule(number=NUMBERS)
    def forget(self, number: int) -> None:
        self.bench.submit(Forget([ENTRIES[number].key]))

    @rule(number=NUMBERS)
    def persist(self, number: int) -> None:
        self.load_id += 1
        self.persists.add(self.load_id)
        self.bench.submit(Persist(self.load_id, keys(path_to(ENTRIES[number]))))

    @rule(number=NUMBERS)
    def export_and_import(self, number: int) -> None:
        entry = ENTRIES[number]
        self.settle()
        if any(key == entry.key for key, _ in self.kept):
            try:
                item = b"".join(self.bench.manager.export_entry(entry.key))
            except (NotFound, Unavailable):
                return  # damaged, or no room
            self.bench.submit(Forget([entry.key]))
            assert self.bench.manager.wait_idle(20)
            self.bench.manager.import_entry([item])

    @rule(number=st.integers(0, 20), place=st.integers(0, 20_000), how=st.sampled_from(["flip", "cut", "remove"]))
    def damage_a_file(self, number: int, place: int, how: str) -> None:
        if self.disk is None:
            return
        self.settle()
        names = sorted(files(self.directory))
        if not names:
            return
        path = self.directory / names[number % len(names)]
        data = bytearray(path.read_bytes())
        if how == "remove":
            path.unlink()
        elif how == "cut":
            path.write_bytes(data[: place % (len(data) + 1)])
        elif data:
            data[place % len(data)] ^= 16
            path.write_bytes(data)

    @rule(place=st.integers(0, 60_000))
    def damage_memory(self, place: int) -> None:
        self.settle()
        memory = self.bench.manager._index.arena._memory
        memory[place % len(memory)] ^= 2

    @rule(number=NUMBERS, other=st.sampled_from(["put", "remove", "flip", "cut"]), place=st.integers(0, 20_000))
    def another_engine(self, number: int, other: str, place: int) -> None:
        """Changes the store like another engine, or damages an object."""
        if self.store is None:
            return
        entry = ENTRIES[number]
        key = f"prefix-cache/toy-1/{entry.key.hex()}"
        data = bytearray(self.store.objects.get(key, (b"", 0))[0])
        if other == "put":
            self.store.objects[key] = (item(entry), time.time())
        elif other == "remove":
            self.store.objects.pop(key, None)
        elif data:
            data[place % len(data)] ^= 2
            self.store.objects[key] = (bytes(data if other == "flip" else data[: place % len(data)]), time.time())

    @rule()
    def store_goes_or_comes(self) -> None:
        if self.store is not None:
            self.store.away = not self.store.away

    @rule()
    def restart(self) -> None:
        if self.disk is None and self.store is None:
            return
        self.follow(self.bench.close())
        self.answered()
        self.open()

    @rule()
    def settle(self) -> None:
        self.follow(self.bench.settle())
        self.answered()
        if self.store is not None:
            self.look_at_the_store(self.store)
        status = self.bench.manager.status()
        for tier, told in status.items():
            assert told.entries == sum(1 for _, other in self.kept if other is tier)
            assert told.size <= told.limit
        for key, _ in self.kept:
            parent = BY_KEY[key].parent
            assert parent is None or any((parent, tier) in self.kept for tier in Tier)
        if self.disk is not None:
            found = files(self.directory)
            on_disk = {f"{key.hex()}.entry" for key, tier in self.kept if tier is Tier.DISK}
            assert found.keys() - on_disk == set()
            assert sum(found.values()) <= status[Tier.DISK].limit
        if Tier.HOST not in status:
            arena = self.bench.manager._index.arena
            assert arena.free == arena.limit

    def look_at_the_store(self, store: ToyStore) -> None:
        """Lists it, and compares what is there with what is known."""
        tier = self.bench.manager._store
        if store.away:
            return
        self.bench.manager._objects._backoff_until = 0.0
        tier.worker.put(tier._erase)
        self.follow(self.bench.settle())
        tier.poller.put(tier._poll)
        self.follow(self.bench.settle())
        known = {f"prefix-cache/toy-1/{key.hex()}" for key, other in self.kept if other is Tier.STORE}
        orphans = {f"prefix-cache/toy-1/{key.hex()}" for key in tier._orphans}
        assert store.objects.keys() == known | orphans
        assert not known & orphans
        # Damaged ones count with the size that they should have, where their header is whole.
        assert tier.size <= self.limits.store_bytes
        assert tier.size >= sum(len(data) for data, _ in store.objects.values())

    def follow(self, events: list[TierEvent]) -> None:
        """Everything that is told agrees with what was told before."""
        for event in events:
            if isinstance(event, Stored):
                assert (event.entry.key, event.tier) not in self.kept
                assert event.entry == BY_KEY[event.entry.key]
                parent = event.entry.parent
                assert parent is None or any((parent, tier) in self.kept for tier in Tier)
                self.kept.add((event.entry.key, event.tier))
            elif isinstance(event, Removed):
                self.kept.remove((event.key, event.tier))
            elif isinstance(event, Released):
                self.saves[event.key] -= 1
                assert self.saves[event.key] >= 0
            elif isinstance(event, Persisted):
                self.persists.remove(event.persist_id)
            elif isinstance(event, Loaded):
                parts = self.loads.pop(event.load_id)
                for part in parts if not event.failed else ():
                    blocks, state = content(BY_KEY[part.key])
                    wanted = blocks[part.skip : part.skip + len(part.blocks)]
                    assert np.array_equal(self.bench.device.blocks[list(part.blocks)], wanted)
                    assert not part.slot or np.array_equal(self.bench.device.slots[part.slot], state)

    def answered(self) -> None:
        assert not +self.saves
        assert not self.loads
        assert not self.persists

    def teardown(self) -> None:
        try:
            if self.bench is not None:
                try:
                    self.settle()
                finally:
                    self.bench.close()
        finally:
            shutil.rmtree(self.directory)


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=100, stateful_step_count=25)
