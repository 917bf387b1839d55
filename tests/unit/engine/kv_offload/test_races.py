"""Races: changes to an entry while it is still read, written or expected."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.engine.kv_cache.keys import Tier
from services.engine.kv_offload.disk import DiskFiles
from services.engine.kv_offload.entry_format import Header
from services.engine.kv_offload.messages import (
    Bytes,
    Entry,
    Forget,
    Loaded,
    Persist,
    Persisted,
    Released,
    Removed,
    Stored,
)
from tests.unit.engine.kv_offload.toy_device import Bench, chain, files, keys, limits
from tests.unit.engine.kv_offload.toy_store import ToyStore, item


class SlowWriter:
    """Files of a disk that stands still when told to, behind each write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        write = DiskFiles.write

        def slowly(files: DiskFiles, header: Header, payload: Sequence[Bytes]) -> None:
            write(files, header, payload)
            self.began.set()
            assert self.go.wait(20)

        monkeypatch.setattr(DiskFiles, "write", slowly)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> SlowWriter:
    return SlowWriter(monkeypatch)


def save(bench: Bench, *entries: object) -> None:
    """Saves like Bench.save, but does not wait for the disk."""
    for entry in entries:
        bench.submit(bench.put(entry))  # type: ignore[arg-type]
        until = time.monotonic() + 10
        assert bench.manager._commands.wait_idle(until)
        assert bench.manager._device.wait_idle(until)
    bench.take()


def test_what_is_read_is_not_evicted() -> None:
    (first,), (second,), (third,) = (chain(4, seed=seed) for seed in range(3))
    with Bench(limits(4)) as bench:  # two pages an entry
        bench.save(first)
        whole = b"".join(bench.manager.export_entry(first.key))
        pieces = bench.manager.export_entry(first.key)
        begin = next(pieces)
        bench.save(second, third)
        assert [event for event in bench.events if isinstance(event, Removed)] == [Removed(second.key, Tier.HOST)]
        assert begin + b"".join(pieces) == whole
        bench.save(second)
        assert [event for event in bench.events if isinstance(event, Removed)][1:] == [Removed(first.key, Tier.HOST)]


def test_what_is_forgotten_while_it_is_read_stays_readable() -> None:
    (first,), (second,) = chain(4, seed=1), chain(4, seed=2)
    with Bench(limits(4)) as bench:
        bench.save(first)
        whole = b"".join(bench.manager.export_entry(first.key))
        pieces = bench.manager.export_entry(first.key)
        begin = next(pieces)
        bench.submit(Forget([first.key]))
        assert bench.settle() == [Removed(first.key, Tier.HOST)]
        bench.save(second)
        assert begin + b"".join(pieces) == whole
        bench.settle()
        assert bench.manager._index.arena.free == 2 * 4096


def test_an_iterator_that_is_closed_lets_go() -> None:
    (first,) = chain(4)
    with Bench(limits(2)) as bench:
        bench.save(first)
        pieces = bench.manager.export_entry(first.key)
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        bench.save(chain(4, seed=5)[0])
        assert bench.manager.status()[Tier.HOST].entries == 1
        assert not bench.counts.troubles


def test_what_is_forgotten_while_it_is_written_leaves_no_file(tmp_path: Path, writer: SlowWriter) -> None:
    first, second = chain(4, 4)
    with Bench(limits(disk_dir=tmp_path)) as bench:
        save(bench, first, second)
        assert writer.began.wait(10)
        bench.submit(Forget([first.key]))
        assert bench.manager._commands.wait_idle(time.monotonic() + 10)
        writer.go.set()
        bench.settle()
        assert files(tmp_path) == {}
        assert not [event for event in bench.events if isinstance(event, Stored) and event.tier is Tier.DISK]
        bench.save(first)
        assert bench.load(first) == Loaded(1)
        assert bench.manager.status()[Tier.DISK].entries == 1


def test_no_child_of_one_that_is_only_expected(tmp_path: Path, writer: SlowWriter) -> None:
    """The parent's file could still come, but it does not, because its bytes are gone."""
    (held,), (parent, child), (other,) = chain(4, seed=1), chain(4, 4, seed=2), chain(4, seed=3)
    with Bench(limits(4, disk_dir=tmp_path)) as bench:
        save(bench, held)
        assert writer.began.wait(10)
        save(bench, parent, other)
        assert Removed(parent.key, Tier.HOST) in bench.events
        save(bench, child)
        assert bench.events[-1] == Released(child.key)
        assert Stored(child, Tier.HOST) not in bench.events
        writer.go.set()
        bench.settle()
        assert Stored(other, Tier.DISK) in bench.events
        assert {event.entry for event in bench.events if isinstance(event, Stored)} == {held, parent, other}
        assert not bench.manager._index.find(parent.key)


def test_a_lost_entry_takes_those_behind_it_although_it_may_come_again(tmp_path: Path, writer: SlowWriter) -> None:
    (held,), (parent, child) = chain(4, seed=1), chain(4, 4, seed=2)
    with Bench(limits(disk_dir=tmp_path)) as bench:
        save(bench, held)
        assert writer.began.wait(10)
        save(bench, parent, child)
        run = bench.manager._index.find(parent.key).buffer.run
        bench.manager._index.arena.pieces(run)[0][7] ^= 1
        assert bench.load(parent) == Loaded(1, (parent.key,))
        dropped = [event for event in bench.events if isinstance(event, Removed)]
        assert dropped == [Removed(child.key, Tier.HOST), Removed(parent.key, Tier.HOST)]
        writer.go.set()
        bench.settle()
        assert set(files(tmp_path)) == {f"{held.key.hex()}.entry"}


def test_a_persist_ends_when_its_entries_do(tmp_path: Path, writer: SlowWriter) -> None:
    (held,), wanted = chain(4, seed=1), chain(4, 4, seed=2)
    with Bench(limits(disk_dir=tmp_path)) as bench:
        save(bench, held)
        assert writer.began.wait(10)
        save(bench, *wanted)
        bench.submit(Persist(1, keys(wanted)), Forget([wanted[0].key]))
        events = bench.wait_for(Persisted, 10, 1)
        assert set(events[0].missing) == {(entry.key, Tier.DISK) for entry in wanted}  # type: ignore[attr-defined]
        writer.go.set()


def test_saved_while_persisted_goes_down_at_once(tmp_path: Path) -> None:
    """A Persist that comes while its entries are being saved."""
    entries = chain(4, 4)
    began, go = threading.Event(), threading.Event()
    with Bench(limits(host=False, disk_dir=tmp_path)) as bench:
        bench.device.before_save = lambda: (began.set(), go.wait(10))
        for place, entry in enumerate(entries):
            bench.submit(bench.put(entry, 1 + 5 * place, 1 + place))
        assert began.wait(10)
        bench.submit(Persist(1, keys(entries)))
        assert bench.manager._commands.wait_idle(time.monotonic() + 10)
        go.set()
        bench.settle()
        assert bench.events[-1] == Persisted(1)
        assert bench.manager._index.arena.free == bench.manager._index.arena.limit


def put(store: ToyStore, *entries: Entry) -> None:
    """Puts an entry into the store like another engine."""
    for place, entry in enumerate(entries):
        store.objects[f"prefix-cache/toy-1/{entry.key.hex()}"] = (item(entry), 1000.0 + place)


def poll(bench: Bench) -> None:
    """Lists the store now."""
    bench.manager._store.poller.put(bench.manager._store._poll)
    assert bench.manager._store.poller.wait_idle(time.monotonic() + 10)


def test_a_persist_while_the_entry_comes_from_elsewhere(tmp_path: Path) -> None:
    """The entry is being saved; the store gets it first, and the disk must get it as well."""
    (held,), (wanted,) = chain(4, seed=1), chain(4, seed=2)
    store = ToyStore()
    began, go = threading.Event(), threading.Event()
    with Bench(limits(disk_dir=tmp_path, store=True, store_poll_seconds=1e6), store) as bench:
        bench.settle()
        bench.device.before_save = lambda: (began.set(), go.wait(10))
        bench.submit(bench.put(held), bench.put(wanted, 20, 2), Persist(1, [wanted.key]))
        assert began.wait(10)
        assert bench.manager._commands.wait_idle(time.monotonic() + 10)
        put(store, wanted)
        poll(bench)
        assert bench.wait_for(Persisted, 10, 1) == [Persisted(1)]
        assert bench.manager.status()[Tier.DISK].entries == 1
        go.set()


def test_who_finds_more_in_the_store_than_its_limit_removes_leaves() -> None:
    store = ToyStore()
    old, new = chain(4, 4, seed=1), chain(4, seed=2)
    with Bench(limits(store=True, store_poll_seconds=1e6, store_bytes=2 * len(item(old[0]))), store) as bench:
        bench.settle()
        put(store, *old, *new)
        bench.settle()
        poll(bench)
        bench.settle()
        left = {name.rpartition("/")[2] for name in store.objects}
        assert len(left) == 2
        assert old[1].key.hex() not in left or {old[0].key.hex(), old[1].key.hex()} == left


def test_orphans_go_first() -> None:
    store = ToyStore()
    first, _, behind = chain(4, 4, 4)
    with Bench(limits(store=True, store_poll_seconds=1e6, store_bytes=2 * len(item(first))), store) as bench:
        bench.settle()
        put(store, first, behind)
        poll(bench)
        assert [event for event in bench.settle() if isinstance(event, Stored)] == [Stored(first, Tier.STORE)]
        assert len(store.objects) == 2
        put(store, *chain(4, seed=2))
        poll(bench)
        bench.settle()
        assert f"prefix-cache/toy-1/{behind.key.hex()}" not in store.objects
        assert len(store.objects) == 2
        assert not bench.counts.troubles


def test_orphans_are_adopted_in_order_however_deep() -> None:
    """A long chain of orphans waits for one entry."""
    store = ToyStore()
    entries = chain(*[1] * 600)
    with Bench(limits(store=True, store_poll_seconds=1e6), store) as bench:
        bench.settle()
        put(store, *entries[1:])
        poll(bench)
        assert bench.settle() == []
        bench.save(entries[0])
        kept = [event.entry for event in bench.events if isinstance(event, Stored) and event.tier is Tier.STORE]
        assert kept == entries[1:]
        bench.submit(Forget([entries[0].key]))
        bench.settle()
        assert store.objects == {}


@pytest.mark.parametrize("behind", [True, False], ids=["its-child", "another"])
def test_a_copy_that_waits_for_memory_is_not_waited_for_by_those_that_have_it(tmp_path: Path, behind: bool) -> None:
    """An entry on disk is wanted in the store, and the memory to read it to is a new entry's, which is wanted there
    as well: behind it, because its parent comes first or because its turn does."""
    old, new = chain(4, 4)
    if not behind:
        (new,) = chain(4, seed=1)
    limit = limits(3, host=False, disk_dir=tmp_path, store=True)
    with Bench(limit, store := ToyStore()) as bench:
        bench.save(old)
        assert not store.objects
        saving, go, copy = threading.Event(), threading.Event(), bench.device.save

        def slowly(*args: Any) -> Any:
            saving.set()
            assert go.wait(20)
            return copy(*args)

        bench.device.save = slowly  # type: ignore[method-assign]
        bench.submit(bench.put(new, 10, 3))
        assert saving.wait(20)
        bench.submit(Persist(1, keys([old, new])))
        assert bench.manager._commands.wait_idle(time.monotonic() + 20)
        go.set()
        assert Persisted(1, ()) in bench.settle()
        assert {key.rpartition("/")[2] for key in store.objects} == {old.key.hex(), new.key.hex()}
        assert bench.load(*([old, new] if behind else [new])) == Loaded(1)
