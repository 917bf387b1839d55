"""Entries through the tiers of one engine."""

from __future__ import annotations

import time
from pathlib import Path

from services.engine.kv_cache.keys import Tier
from services.engine.kv_offload.entry_format import entry_bytes
from services.engine.kv_offload.messages import (
    Loaded,
    Pin,
    Released,
    Removed,
    Stored,
    Use,
)
from tests.unit.engine.kv_offload.toy_device import LAYOUT, Bench, chain, files, keys, limits


def test_saved_entries_come_back_from_the_host() -> None:
    entries = chain(8, 6, 9)
    with Bench() as bench:
        assert bench.save(entries[0]) == [Stored(entries[0], Tier.HOST), Released(entries[0].key)]
        bench.save(*entries[1:])
        assert bench.load(*entries) == Loaded(1)
        assert bench.load(entries[0], skip=1) == Loaded(2)
        assert bench.counts.loaded[Tier.HOST] == 7000 + 5000 + 6000
        status = bench.manager.status()
        assert status == {Tier.HOST: status[Tier.HOST]}
        assert (status[Tier.HOST].entries, status[Tier.HOST].limit) == (3, 40 * 4096)
    assert not bench.counts.troubles


def test_an_entry_is_saved_once_and_never_before_the_one_it_stands_on() -> None:
    first, second = chain(4, 4)
    with Bench() as bench:
        assert bench.save(second) == [Released(second.key)]
        assert bench.counts.troubles[Tier.HOST, "missing"] == 1
        bench.save(first)
        assert bench.save(first) == [Released(first.key)]
        assert bench.load(first) == Loaded(1)
        assert bench.load(second) == Loaded(2, (second.key,))
        assert bench.load() == Loaded(3)


def test_a_parent_that_went_before_anybody_heard_of_it_is_no_failure() -> None:
    """Its event is still under way when the loop chooses it: the save is given up, and no word of it is said."""
    parent, child, grandchild = chain(4, 4, 4)
    (other,) = chain(8, seed=1, seconds=9.0)
    with Bench(limits(3)) as bench:
        bench.save(parent)
        bench.submit(bench.put(other, 10, 3))
        assert bench.manager.wait_idle(20)  # the parent has made room, and its Removed was not taken
        bench.submit(bench.put(child, 20, 4), bench.put(grandchild, 25, 5))
        events = bench.settle()
        assert Removed(parent.key, Tier.HOST) in events
        assert events[-2:] == [Released(child.key), Released(grandchild.key)]
        assert not bench.counts.troubles


def test_from_disk_after_a_restart(tmp_path: Path) -> None:
    entries = chain(8, 6, 9)
    directory = tmp_path / "disk"
    with Bench(limits(disk_dir=directory)) as bench:
        bench.save(*entries)
        assert [event for event in bench.events if isinstance(event, Stored) and event.tier is Tier.DISK] == [
            Stored(entry, Tier.DISK) for entry in entries
        ]
    sizes = {f"{entry.key.hex()}.entry": entry_bytes(entry, LAYOUT) for entry in entries}
    assert files(directory) == sizes
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    for host in (40, 3):
        # With little memory it is not warm, and the parts go through it one after the other.
        with Bench(limits(host, disk_dir=directory)) as bench:
            bench.settle()
            assert [
                event.entry for event in bench.events if isinstance(event, Stored) and event.tier is Tier.DISK
            ] == entries
            assert bench.load(*entries) == Loaded(1)
            assert (bench.counts.loaded[Tier.DISK] == 0) == (host == 40)
            assert bench.manager.status()[Tier.DISK].size == sum(sizes.values())
            assert not bench.counts.troubles


def test_without_the_host_as_a_tier_its_memory_is_only_the_way(tmp_path: Path) -> None:
    entries = chain(8, 6, 9)
    with Bench(limits(host=False, disk_dir=tmp_path)) as bench:
        assert bench.save(entries[0]) == [Released(entries[0].key), Stored(entries[0], Tier.DISK)]
        bench.save(*entries[1:])
        assert bench.load(*entries) == Loaded(1)
        assert set(bench.manager.status()) == {Tier.DISK}
        bench.settle()
        assert bench.manager._index.arena.free == bench.manager._index.arena.limit
        assert not bench.counts.troubles


def test_the_host_gives_up_what_is_worth_least_leaves_first() -> None:
    # Two pages an entry: one block and the state.
    used, unused, last = chain(4, 4, seed=1), chain(4, 4, seed=2), chain(4, seed=3)
    with Bench(limits(8)) as bench:
        bench.save(*used, *unused)
        bench.submit(Use(keys(used)))
        bench.settle()
        assert bench.save(*last) == [
            Removed(unused[1].key, Tier.HOST),
            Stored(last[0], Tier.HOST),
            Released(last[0].key),
        ]
        assert bench.counts.evicted[Tier.HOST] == 8192
        assert bench.load(*used) == Loaded(1)


def test_pinned_ones_stay_and_nobody_evicts_what_its_child_needs() -> None:
    pinned, others = chain(4, 4, seed=1), chain(4, 4, 4, seed=2)
    with Bench(limits(8)) as bench:
        bench.save(*pinned)
        bench.submit(Pin(keys(pinned), time.monotonic() + 60))
        bench.save(*others)
        assert bench.manager.status()[Tier.HOST].entries == 4
        assert bench.load(*others) == Loaded(1)
        assert bench.load(*pinned) == Loaded(2, keys(pinned[1:]))


def test_saves_that_come_together_do_not_give_up_what_each_other_stands_on() -> None:
    (other,), (new,) = chain(4, seed=1), chain(4, seed=2)
    first, second = chain(4, 4, seed=3, seconds=0.5)
    with Bench(limits(4)) as bench:
        bench.save(first, other)
        bench.submit(bench.put(new, 10, 3), bench.put(second, 20, 4))
        assert Removed(other.key, Tier.HOST) in bench.settle(), "although the first one is worth less"
        assert bench.load(first, second) == Loaded(1)
        assert not bench.counts.troubles


def test_a_save_without_room_is_given_up() -> None:
    (large,) = chain(40)
    with Bench(limits(2)) as bench:
        assert bench.save(large) == [Released(large.key)]
        assert bench.counts.troubles[Tier.HOST, "full"] == 1


def test_the_host_gives_up_freely_what_the_disk_has(tmp_path: Path) -> None:
    entries = chain(4, 4, 4, 4, 4, 4)
    with Bench(limits(4, disk_dir=tmp_path)) as bench:
        bench.save(*entries)
        assert bench.manager.status()[Tier.HOST].entries == 2
        assert bench.manager.status()[Tier.DISK].entries == 6
        assert bench.load(*entries) == Loaded(1)
        assert bench.counts.loaded[Tier.DISK] > 0


def test_the_disk_keeps_its_limit_and_gives_up_leaves(tmp_path: Path) -> None:
    old, new = chain(4, 4, 4, seed=1), chain(4, 4, seed=2)
    size = entry_bytes(old[0], LAYOUT)
    with Bench(limits(2, disk_dir=tmp_path, disk_bytes=4 * size)) as bench:
        bench.save(*old, *new)
        assert set(files(tmp_path)) == {f"{entry.key.hex()}.entry" for entry in (*old[:2], *new)}
        assert bench.load(*old[:2]) == Loaded(1)
        assert bench.load(old[2]) == Loaded(2, (old[2].key,))
