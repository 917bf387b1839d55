"""The store as a tier, on a real S3 server: shared by engines, and away, slow or damaged in every way."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.engine.kv_cache.keys import Tier
from services.engine.kv_offload import object_store
from services.engine.kv_offload.entry_format import entry_bytes
from services.engine.kv_offload.messages import (
    Entry,
    Forget,
    Loaded,
    Persist,
    Persisted,
    Pin,
    Released,
    Removed,
    Stored,
    Use,
)
from tests.integration.servers import RunningServer
from tests.unit.engine.kv_offload.toy_device import LAYOUT, Bench, chain, keys, limits

PREFIX = f"prefix-cache/{LAYOUT.fingerprint}-1/"


class Line:
    """A TCP proxy that can stop passing bytes on, end connections after some, or take none."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._upstream = (host, int(port))
        self.flows = threading.Event()
        self.flows.set()
        self.most_bytes = 0
        """Most bytes to the client for each connection, which then ends; 0: any number."""
        self.refuses = False
        self.asked = 0
        """Connections that were begun, and pieces that came through those that were taken."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.flows.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.asked += 1
            if self.refuses:
                client.close()
                continue
            server = socket.create_connection(self._upstream)
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, back: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(65536):
                self.asked += not back
                self.flows.wait()
                if self.refuses:
                    break
                if back and self.most_bytes and passed + len(data) > self.most_bytes:
                    target.sendall(data[: self.most_bytes - passed])
                    break
                passed += len(data)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def line(s3: RunningServer) -> Iterator[Line]:
    line = Line(s3.address)
    yield line
    line.close()


@pytest.fixture
def behind_line(store: ObjectStore, settings: CommonSettings, line: Line) -> ObjectStore:
    """The same bucket through the line."""
    return ObjectStore(settings.model_copy(update={"s3_endpoint": line.address}))


def engine(store: ObjectStore, **changes: object) -> Bench:
    return Bench(limits(**({"store": True, "store_after_uses": 0} | changes)), store)


def wait_until(bench: Bench, is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        bench.take()
        assert time.monotonic() < until
        time.sleep(0.02)


def in_store(bench: Bench, *entries: Entry) -> Callable[[], bool]:
    """True if the engine has found these objects."""
    return lambda: all(Stored(entry, Tier.STORE) in bench.events for entry in entries)


def objects(store: ObjectStore) -> set[str]:
    return {key.removeprefix(PREFIX) for key in store.list(PREFIX)}


def names(*entries: Entry) -> set[str]:
    return {entry.key.hex() for entry in entries}


def test_what_one_engine_persists_another_loads(store: ObjectStore) -> None:
    entries = chain(8, 6, 9)
    with engine(store) as one, engine(store) as other:
        one.save(*entries)
        one.submit(Persist(1, keys(entries)))
        one.wait_for(Persisted, 20, 1)
        assert Persisted(1) in one.events
        assert objects(store) == names(*entries)
        wait_until(other, in_store(other, *entries))
        assert [event.entry for event in other.events if isinstance(event, Stored)] == entries
        assert other.load(*entries) == Loaded(1)
        assert other.counts.loaded[Tier.STORE] == 7000 + 5000
        assert other.load(*entries) == Loaded(2)
        assert other.counts.loaded[Tier.HOST] == 7000 + 5000
        assert other.manager.status()[Tier.STORE].size == sum(entry_bytes(entry, LAYOUT) for entry in entries)
        # Both have the same; the one that comes second is content.
        other.submit(Use(keys(entries)))
        other.settle()
        assert not one.counts.troubles
        assert not other.counts.troubles
    with engine(store) as third:
        wait_until(third, in_store(third, *entries))
        assert third.load(*entries) == Loaded(1)


def test_two_engines_put_the_same_at_once(store: ObjectStore) -> None:
    entries = chain(8, 6, 9)
    with engine(store, store_poll_seconds=60.0) as one, engine(store, store_poll_seconds=60.0) as other:
        for bench in (one, other):
            for place, entry in enumerate(entries):
                bench.submit(bench.put(entry, 1 + 5 * place, 1 + place))
        for bench in (one, other):
            bench.settle()
            assert in_store(bench, *entries)()
            assert not bench.counts.troubles
        assert objects(store) == names(*entries)


def test_only_what_was_used_goes_there(store: ObjectStore) -> None:
    used, unused = chain(4, 4, seed=1), chain(4, seed=2)
    with engine(store, store_after_uses=1) as bench:
        bench.save(*used, *unused)
        bench.submit(Use(keys(used)), Use(keys(unused)))  # they were made
        bench.settle()
        assert objects(store) == set()
        bench.submit(Use(keys(used[:1])))
        bench.settle()
        assert objects(store) == names(used[0])
        bench.submit(Use(keys(used)))
        bench.settle()
        assert objects(store) == names(*used)


def test_pinned_ones_go_there_at_the_end(store: ObjectStore) -> None:
    pinned, other = chain(4, 4, seed=1), chain(4, seed=2)
    with engine(store, store_after_uses=1) as bench:
        bench.save(*pinned, *other)
        bench.submit(Pin(keys(pinned), time.monotonic() + 60))
        bench.settle()
        assert objects(store) == set()
    assert objects(store) == names(*pinned)


def test_with_the_store_alone_everything_goes_there(store: ObjectStore) -> None:
    entries = chain(8, 6)
    with engine(store, host=False, store_after_uses=1) as bench:
        assert bench.save(entries[0]) == [Released(entries[0].key), Stored(entries[0], Tier.STORE)]
        bench.save(entries[1])
        assert bench.load(*entries) == Loaded(1)
        bench.settle()
        assert bench.manager._index.arena.free == bench.manager._index.arena.limit


def test_persist_brings_to_disk_what_only_the_store_has(store: ObjectStore, tmp_path: Path) -> None:
    entries = chain(8, 6)
    with engine(store) as bench:
        bench.save(*entries)
    with engine(store, disk_dir=tmp_path) as bench:
        wait_until(bench, in_store(bench, *entries))
        bench.submit(Persist(1, keys(entries)))
        bench.wait_for(Persisted, 20, 1)
        assert Persisted(1) in bench.events
        assert bench.manager.status()[Tier.DISK].entries == 2


def test_the_limit_is_for_all_and_leaves_go_first(store: ObjectStore) -> None:
    old, new = chain(4, 4, 4, seed=1), chain(4, seed=2)
    size = entry_bytes(old[0], LAYOUT)
    with engine(store) as one, engine(store, store_bytes=3 * size) as other:
        one.save(*old)
        wait_until(other, in_store(other, *old))
        other.save(*new)
        other.settle()
        assert objects(store) == names(*old[:2], *new)
        wait_until(one, lambda: Removed(old[2].key, Tier.STORE) in one.events)
        assert one.load(*old) == Loaded(1)  # its own copy is still there


def test_forgotten_ones_are_removed_there_and_what_others_put_behind_them(store: ObjectStore) -> None:
    first, second, third = chain(4, 4, 4)
    with engine(store) as one, engine(store, store_poll_seconds=60.0) as other:
        one.save(first, second)
        other.save(first, second)
        one.submit(Forget([second.key]))
        one.settle()
        assert objects(store) == names(first)
        other.save(third)  # it does not know yet
        wait_until(one, lambda: objects(store) == names(first))
        one.save(second)
        one.settle()
        assert objects(store) == names(first, second)


def test_an_entry_waits_for_the_one_it_stands_on(store: ObjectStore) -> None:
    entries = chain(4, 4, 4)
    with engine(store) as bench:
        bench.save(*entries)
    hidden = store.get(PREFIX + entries[0].key.hex()).data
    store.delete(PREFIX + entries[0].key.hex())
    with engine(store, store_poll_seconds=60.0) as bench:
        bench.settle()
        assert bench.events == []
        bench.save(entries[0])
        assert in_store(bench, *entries)()
        assert bench.load(*entries) == Loaded(1)
    assert objects(store) == names(*entries)
    assert store.get(PREFIX + entries[0].key.hex()).data == hidden


@pytest.mark.parametrize("place", [50, 4096 + 100, -1])
def test_a_damaged_object_is_a_miss_and_removed(store: ObjectStore, place: int) -> None:
    first, second = chain(4, 4)
    with engine(store) as bench:
        bench.save(first, second)
    name = PREFIX + second.key.hex()
    data = bytearray(store.get(name).data)
    data[place] ^= 1
    store.put(name, bytes(data))
    with engine(store) as bench:
        wait_until(bench, in_store(bench, first))
        bench.settle()
        if in_store(bench, second)():
            assert bench.load(first, second) == Loaded(1, (second.key,))
        bench.settle()
        assert bench.counts.troubles == {(Tier.STORE, "damaged"): 1}
        assert objects(store) == names(first)
        bench.save(second)
        bench.settle()
        assert objects(store) == names(first, second)


def test_a_truncated_object_is_a_miss(store: ObjectStore) -> None:
    (entry,) = chain(8)
    with engine(store) as bench:
        bench.save(entry)
        name = PREFIX + entry.key.hex()
    with engine(store, host=False, store_poll_seconds=60.0) as bench:
        wait_until(bench, in_store(bench, entry))
        store.put(name, store.get(name).data[:-1000])
        assert bench.load(entry) == Loaded(1, (entry.key,))
        assert bench.counts.troubles == {(Tier.STORE, "damaged"): 1}


def test_an_object_that_is_gone_is_a_miss(store: ObjectStore) -> None:
    (entry,) = chain(8)
    with engine(store) as bench:
        bench.save(entry)
    with engine(store, store_poll_seconds=60.0) as bench:
        wait_until(bench, in_store(bench, entry))
        store.delete(PREFIX + entry.key.hex())
        assert bench.load(entry) == Loaded(1, (entry.key,))
        bench.settle()
        assert Removed(entry.key, Tier.STORE) in bench.events
        assert bench.counts.troubles == {(Tier.STORE, "missing"): 1}


def test_a_store_that_hangs_costs_one_deadline_and_is_then_left_alone(
    store: ObjectStore, behind_line: ObjectStore, line: Line
) -> None:
    entries = chain(8, 6)
    with engine(store) as bench:
        bench.save(*entries)
    with engine(behind_line, load_seconds=0.5, store_poll_seconds=60.0) as bench:
        wait_until(bench, in_store(bench, *entries))
        line.flows.clear()
        began = time.monotonic()
        assert bench.load(*entries) == Loaded(1, keys(entries))  # while it still hangs
        assert time.monotonic() - began > 0.4
        assert bench.counts.troubles[Tier.STORE, "slow"] >= 1
        other = chain(4, seed=5)
        bench.submit(*(bench.put(entry) for entry in other))  # what needs no store goes on
        wait_until(bench, lambda: Released(other[0].key) in bench.events)
        line.flows.set()
        assert bench.manager.wait_idle(30)
        until = time.monotonic() + 20
        while bench.load(*entries).failed:  # in time it is asked again
            assert time.monotonic() < until
            time.sleep(0.3)
        bench.settle()


@pytest.mark.parametrize("how", ["refuses", "truncates"])
def test_a_store_that_fails_is_a_miss_and_left_alone(
    how: str, store: ObjectStore, behind_line: ObjectStore, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_FIRST_PAUSE", 600.0)
    entries = chain(8, 6)
    with engine(store) as bench:
        bench.save(*entries)
    with engine(behind_line, store_poll_seconds=60.0, load_seconds=30.0) as bench:
        wait_until(bench, in_store(bench, *entries))
        line.refuses = how == "refuses"
        line.most_bytes = 900
        assert bench.load(*entries) == Loaded(1, keys(entries))
        assert bench.counts.troubles[Tier.STORE, "away"] >= 1
        asked = line.asked
        assert bench.load(*entries) == Loaded(2, keys(entries))
        bench.submit(Persist(1, [entries[0].key]), bench.put(chain(4, seed=5)[0]))
        bench.settle()
        assert line.asked == asked
        assert Persisted(1) in bench.events  # there it is
        line.refuses, line.most_bytes = False, 0
        assert bench.load(*entries).failed, "the pause is not over"
        bench.manager._objects._backoff_until = 0.0
        assert not bench.load(*entries).failed


def test_a_persist_while_the_store_is_away_says_so(store: ObjectStore, behind_line: ObjectStore, line: Line) -> None:
    entries = chain(4, 4)
    with engine(behind_line, store_after_uses=1, store_poll_seconds=60.0) as bench:
        bench.settle()
        bench.save(*entries)
        line.refuses = True
        bench.submit(Persist(1, keys(entries)))
        bench.wait_for(Persisted, 30, 1)
        assert Persisted(1, tuple((entry.key, Tier.STORE) for entry in entries)) in bench.events
        line.refuses = False
        time.sleep(1.1)
        bench.submit(Persist(2, keys(entries)))
        bench.wait_for(Persisted, 30, 2)
        assert Persisted(2) in bench.events


def test_what_is_forgotten_while_the_store_is_away_is_removed_later(
    store: ObjectStore, behind_line: ObjectStore, line: Line
) -> None:
    (entry,) = chain(4)
    with engine(behind_line, store_poll_seconds=0.2) as bench:
        bench.save(entry)
        bench.settle()
        line.refuses = True
        bench.submit(Forget([entry.key]))
        bench.settle()
        assert objects(store) == names(entry)
        line.refuses = False
        wait_until(bench, lambda: objects(store) == set())
        assert [event for event in bench.events if isinstance(event, Stored)] == [
            Stored(entry, Tier.HOST),
            Stored(entry, Tier.STORE),
        ]


def test_closing_does_not_wait_for_a_store_that_hangs(
    behind_line: ObjectStore, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.common.storage.s3_connection.READ_SECONDS", 120.0)
    entries = chain(4, 4)
    bench = engine(behind_line, store_after_uses=1, store_poll_seconds=60.0)
    bench.save(*entries)
    bench.submit(Pin(keys(entries), time.monotonic() + 60), Persist(1, keys(entries)))
    assert bench.manager._commands.wait_idle(time.monotonic() + 10)
    line.flows.clear()
    began = time.monotonic()
    bench.close(0.5)
    assert time.monotonic() - began < 60
    line.flows.set()
