"""Loads."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from services.common.errors import InvalidRequest, NotFound
from services.engine.kv_cache.block_pool import IntegrityError
from services.engine.kv_cache.keys import Tier
from services.engine.kv_offload.entry_format import entry_bytes
from services.engine.kv_offload.messages import (
    Forget,
    GiveUp,
    Load,
    Loaded,
    Part,
    Persist,
    Persisted,
    Released,
    Removed,
    Stored,
)
from tests.unit.engine.kv_offload.manager_device import Stuck
from tests.unit.engine.kv_offload.toy_device import LAYOUT, Bench, chain, content, files, keys, limits


def test_two_loads_of_the_same_entries_at_once(tmp_path: Path) -> None:
    entries = chain(8, 8)
    with Bench(limits(disk_dir=tmp_path)) as bench:
        bench.save(*entries)
    with Bench(limits(disk_dir=tmp_path), start=False) as bench:
        bench.manager._disk._warm = False
        bench.manager.start()
        bench.settle()
        loads = []
        for load_id in range(4):
            place = 1 + 10 * load_id
            parts = [Part(entries[0].key, 0, (place, place + 1), 0), Part(entries[1].key, 1, (place + 2,), 1 + load_id)]
            loads.append(Load(100 + load_id, parts))
        bench.submit(*loads)
        bench.settle()
        for load_id in range(4):
            assert bench.wait_loaded(100 + load_id) == Loaded(100 + load_id)
            blocks = bench.device.blocks[1 + 10 * load_id : 4 + 10 * load_id]
            assert (blocks[:2] == content(entries[0])[0]).all()
            assert (blocks[2] == content(entries[1])[0][1]).all()
            assert (bench.device.slots[1 + load_id] == content(entries[1])[1]).all()


def test_a_load_does_not_wait_behind_saves() -> None:
    entries = [chain(4, seed=seed)[0] for seed in range(6)]
    began, go = threading.Event(), threading.Event()
    order: list[str] = []
    with Bench() as bench:
        bench.save(entries[0])

        def before_save() -> None:
            order.append("save")
            began.set()
            go.wait(10)

        bench.device.before_save = before_save
        bench.device.before_load = lambda: order.append("load")
        bench.submit(*(bench.put(entry) for entry in entries[1:]))
        began.wait(10)
        bench.load(entries[0], wait=False)
        assert bench.manager._commands.wait_idle(time.monotonic() + 10)
        go.set()
        bench.settle()
        assert order == ["save", "load", "save", "save", "save", "save"]


def test_a_load_that_is_given_up_ends_at_once_and_what_is_read_stays(tmp_path: Path) -> None:
    entries = chain(8, 6)
    with Bench(limits(disk_dir=tmp_path)) as bench:
        bench.save(*entries)
        with bench.manager._index.lock:
            for entry in entries:
                record = bench.manager._index.find(entry.key)
                assert record is not None
                bench.manager._index.drop(record, Tier.HOST)
        disk, before = Stuck(bench), bench.manager._bandwidth.price(Tier.DISK, 10_000)
        bench.load(*entries, wait=False)
        assert disk.begun.wait(20)
        time.sleep(0.02)
        bench.submit(GiveUp(1))
        assert bench.wait_loaded(1) == Loaded(1, keys(entries))
        assert bench.counts.troubles == {(Tier.DISK, "late"): 1}
        assert bench.manager._bandwidth.price(Tier.DISK, 10_000) > 2 * before, "which is learnt"
        disk.may_go_on.set()
        bench.settle()
        assert bench.manager.status()[Tier.HOST].entries == 2
        assert bench.load(*entries) == Loaded(2)
        bench.submit(GiveUp(2), GiveUp(7))
        bench.settle()
        assert bench.counts.troubles == {(Tier.DISK, "late"): 1}, "of others there is nothing to give up"


def test_a_load_given_up_while_it_waits_for_the_device() -> None:
    first, second = chain(8, seed=1), chain(6, seed=2)
    begun, may_go_on = threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        assert may_go_on.wait(20)

    with Bench() as bench:
        bench.save(*first, *second)
        bench.device.before_load = copy
        before = bench.manager.seconds(Tier.HOST, 1000)
        bench.load(*first, wait=False)
        assert begun.wait(20)
        bench.load(*second, wait=False)
        bench.submit(GiveUp(2), GiveUp(1))
        assert bench.manager._commands.wait_idle(time.monotonic() + 20)
        may_go_on.set()
        # The one that was being copied was, but its targets are nobody's before that.
        assert bench.wait_loaded(1) == Loaded(1, keys(first))
        assert bench.wait_loaded(2) == Loaded(2, keys(second))
        assert bench.counts.troubles == {(Tier.HOST, "late"): 2}
        assert bench.counts.loaded[Tier.HOST] == 7000
        bench.settle()
        assert bench.manager.seconds(Tier.HOST, 1000) < 1.0 + before, "nothing counts as under way any more"


def test_who_keeps_a_given_up_load_waiting_is_slow_all_the_same(tmp_path: Path) -> None:
    entries = chain(8)
    with Bench(limits(disk_dir=tmp_path, host=False, load_seconds=0.1)) as bench:
        bench.save(*entries)
        disk = Stuck(bench)
        bench.load(*entries, wait=False)
        assert disk.begun.wait(20)
        bench.submit(GiveUp(1))
        assert bench.wait_loaded(1).failed
        until = time.monotonic() + 20
        while not bench.counts.troubles[Tier.DISK, "slow"]:
            assert time.monotonic() < until
            time.sleep(0.01)
        disk.may_go_on.set()
        bench.settle()


def test_the_speed_of_a_disk_is_known_before_what_is_on_it(tmp_path: Path) -> None:
    with Bench(limits(disk_dir=tmp_path)) as bench:
        bench.save(*chain(8))
    with Bench(limits(disk_dir=tmp_path, host=False), start=False) as bench:
        files, bandwidth = bench.manager._files, bench.manager._bandwidth
        assert files is not None
        size, seconds = files.probe(chain(8)[0])
        assert (size, seconds > 0) == (7000, True)
        files.probe = lambda entry: (10**8, 0.2)  # type: ignore[method-assign]
        bench.manager.start()
        bench.settle()
        assert bandwidth.price(Tier.DISK, 10**8) == pytest.approx(0.2, rel=0.15)


def test_damage_in_memory_is_a_miss_and_the_disk_has_another_copy(tmp_path: Path) -> None:
    entries = chain(8, 6)
    for disk in (False, True):
        with Bench(limits(disk_dir=tmp_path if disk else None)) as bench:
            bench.save(*entries)
            for page in range(40):
                bench.manager._index.arena._memory[page * 4096 + 700] ^= 4
            if disk:
                assert bench.load(*entries) == Loaded(1)
                assert bench.counts.troubles == {(Tier.HOST, "damaged"): 2}
                assert bench.load(*entries) == Loaded(2)
                assert bench.counts.troubles == {(Tier.HOST, "damaged"): 2}
            else:
                assert bench.load(entries[0]) == Loaded(1, (entries[0].key,))
                bench.take()
                # Also what stands on it, from the end.
                dropped = [event for event in bench.events if isinstance(event, Removed)]
                assert dropped == [Removed(entry.key, Tier.HOST) for entry in reversed(entries)]
                assert bench.manager.status()[Tier.HOST].size == 0


def test_only_what_is_loaded_is_checked() -> None:
    (entry,) = chain(8)
    with Bench() as bench:
        bench.save(entry)
        bench.manager._index.arena._memory[10] ^= 1
        assert bench.load(entry, skip=1) == Loaded(1)
        assert bench.load(entry) == Loaded(2, (entry.key,))


def test_forget_is_for_all_tiers_and_all_behind(tmp_path: Path) -> None:
    first, second, third = chain(4, 4, 4)
    with Bench(limits(disk_dir=tmp_path)) as bench:
        bench.save(first, second, third)
        bench.submit(Forget([second.key]))
        events = bench.settle()
        assert {(event.key, event.tier) for event in events if isinstance(event, Removed)} == {
            (entry.key, tier) for entry in (second, third) for tier in (Tier.HOST, Tier.DISK)
        }
        assert set(files(tmp_path)) == {f"{first.key.hex()}.entry"}
        assert bench.save(second)[0] == Stored(second, Tier.HOST)
        assert bench.load(first, second) == Loaded(1)


def test_what_is_forgotten_while_it_is_saved_is_released_and_not_kept() -> None:
    first, second = chain(4, 4)
    began, go = threading.Event(), threading.Event()
    with Bench() as bench:
        bench.device.before_save = lambda: (began.set(), go.wait(10))
        bench.submit(bench.put(first), bench.put(second))
        began.wait(10)
        bench.submit(Forget([first.key]))
        assert bench.manager._commands.wait_idle(time.monotonic() + 10)
        go.set()
        assert bench.settle() == [Released(first.key), Released(second.key)]
        assert bench.manager._index.arena.free == bench.manager._index.arena.limit


def test_persist_waits_for_saves_and_says_what_is_missing(tmp_path: Path) -> None:
    first, second, third = chain(4, 4, 4)
    with Bench(limits(disk_dir=tmp_path)) as bench:
        bench.submit(bench.put(first), bench.put(second), Persist(7, keys([first, second])), Persist(8, [third.key]))
        events = bench.settle()
        assert Persisted(8, ((third.key, Tier.DISK),)) in events
        assert events[-1] == Persisted(7)
        bench.submit(Persist(9, keys([first, second])))
        assert bench.settle() == [Persisted(9)]
    with Bench() as bench:
        bench.save(first)
        bench.submit(Persist(1, keys([first, second])))
        assert bench.settle() == [Persisted(1, ((second.key, Tier.HOST),))]


def test_a_failing_device_is_no_end() -> None:
    (first,), (second,) = chain(4, seed=1), chain(4, seed=2)

    def fail() -> None:
        raise RuntimeError("device")

    with Bench() as bench:
        bench.save(second)
        bench.device.before_save = bench.device.before_load = fail
        assert bench.save(first) == [Released(first.key)]
        assert bench.load(second) == Loaded(1, (second.key,))
        bench.device.before_save = bench.device.before_load = lambda: None
        bench.save(first)
        assert bench.load(first) == Loaded(2)
        assert bench.load(second) == Loaded(3)


def test_close_answers_everything(tmp_path: Path) -> None:
    entries = [chain(4, seed=seed)[0] for seed in range(3)]
    bench = Bench(limits(disk_dir=tmp_path))
    bench.save(entries[0])
    bench.device.before_save = lambda: time.sleep(0.2)
    bench.submit(bench.put(entries[1]), bench.put(entries[2]))
    bench.load(entries[0], wait=False)
    bench.submit(Persist(5, [entries[1].key]))
    bench.close()
    bench.load(entries[0], wait=False)
    bench.submit(bench.put(entries[2]), Persist(6, [entries[0].key]))
    bench.take()
    released = [event.key for event in bench.events if isinstance(event, Released)]
    assert sorted(released) == sorted([*keys(entries), entries[2].key])
    assert Loaded(1) in bench.events
    assert Loaded(2, (entries[0].key,)) in bench.events
    assert Persisted(5) in bench.events
    assert Persisted(6, ((entries[0].key, Tier.DISK),)) in bench.events
    with Bench(limits(disk_dir=tmp_path)) as bench:  # the lock is free, and all is there
        bench.settle()
        assert bench.manager.status()[Tier.DISK].entries == 3


def test_export_and_import() -> None:
    entries = chain(8, 6, 9)
    with Bench() as bench:
        bench.save(*entries)
        items = [list(bench.manager.export_entry(entry.key)) for entry in entries]
        with pytest.raises(NotFound):
            bench.manager.export_entry(chain(1, seed=9)[0].key)
    assert [sum(map(len, item)) for item in items] == [entry_bytes(entry, LAYOUT) for entry in entries]
    with Bench() as bench:
        with pytest.raises(InvalidRequest, match="parent of an entry"):
            bench.manager.import_entry(items[1])
        for entry, item in zip(entries, items, strict=True):
            whole = b"".join(item)
            bad = bytearray(whole)
            bad[-1] ^= 1
            for pieces, reason in (
                ([whole[:-1]], "truncated"),
                ([whole[:5]], "truncated"),
                ([whole, b"", b"x"], "longer"),
                ([bytes(bad)], "checksums"),
                ([b"x" * 5000], "does not begin"),
            ):
                with pytest.raises(InvalidRequest, match=reason):
                    bench.manager.import_entry(pieces)
                bench.manager.check()
            step = 777
            assert bench.manager.import_entry(whole[i : i + step] for i in range(0, len(whole), step)) == entry
            assert bench.manager.import_entry(item) == entry
        assert bench.settle() == [Stored(entry, Tier.HOST) for entry in entries]
        assert bench.load(*entries) == Loaded(1)


def test_damage_is_not_exported() -> None:
    from services.common.errors import Unavailable

    (entry,) = chain(8)
    with Bench() as bench:
        bench.save(entry)
        bench.manager._index.arena._memory[10] ^= 1
        with pytest.raises(Unavailable, match="damaged"):
            bench.manager.export_entry(entry.key)
        assert bench.settle() == [Removed(entry.key, Tier.HOST)]


def test_settling_ends_also_where_a_copy_does_not() -> None:
    (entry,) = chain(8)
    with Bench() as bench:
        go_on = threading.Event()
        bench.device.before_save = lambda: go_on.wait(20) and None
        bench.submit(bench.put(entry))
        with pytest.raises(IntegrityError, match=r"the tiers still copy after 0\.1 s"):
            bench.manager.settle(0.1)
        go_on.set()
        bench.manager.settle()
