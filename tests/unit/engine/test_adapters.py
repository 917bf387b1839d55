"""The adapter manager against a registry in memory; real threads, no torch."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import Pointers
from services.common.errors import (
    AdapterRejected,
    ModelNotFound,
    Overloaded,
    TemperError,
    Unavailable,
)
from services.engine.adapters.loader import AdapterLoader
from services.engine.adapters.manager import AdapterManager
from services.engine.adapters.slot_table import AdapterLimits
from services.engine.observability.events import (
    AdapterLoadFailed,
    AdapterPhase,
    AdapterPhaseDone,
    EngineEvent,
    EventStream,
    LoadFailure,
)
from services.engine.requests.adapter import BASE_PIN, AdapterChoice, AdapterPin

ATTACHED = AdapterChoice(attached=True)


@dataclass
class FakeManifest:
    digest: str
    base_digest: str = "base"


@dataclass
class FakeRegistry:
    """Names to version counts; versions listed in ``corrupt`` do not bind."""

    current_versions: dict[str, int] = field(default_factory=dict)
    attachment: AdapterVersion | None = None
    corrupt: set[str] = field(default_factory=set)
    foreign: set[str] = field(default_factory=set)
    away: bool = False
    calls: list[str] = field(default_factory=list)

    def _touch(self, call: str) -> None:
        self.calls.append(call)
        if self.away:
            raise Unavailable("the store is away")

    def pointers(self) -> Pointers:
        self._touch("pointers")
        return Pointers(
            self.attachment, dict(self.current_versions), repr((self.attachment, sorted(self.current_versions.items())))
        )

    def current(self, name: str) -> AdapterVersion:
        self._touch(f"current {name}")
        if name not in self.current_versions:
            raise ModelNotFound("no")
        return AdapterVersion(name, self.current_versions[name])

    def manifest(self, version: AdapterVersion) -> FakeManifest:
        self._touch(f"manifest {version}")
        if version.version > self.current_versions.get(version.name, 0):
            raise ModelNotFound("no")
        return FakeManifest(f"digest {version}", "another" if str(version) in self.foreign else "base")

    def files(self, version: AdapterVersion) -> dict[str, bytes]:
        self._touch(f"files {version}")
        return {"weights": str(version).encode()}


class FakeLora:
    def __init__(self) -> None:
        self.slots: dict[int, str] = {}

    def load(self, slot: int, bound: str) -> None:
        self.slots[slot] = bound


class FakeLoop:
    """Runs boundary calls on its own thread, like the engine loop; counts retries."""

    def __init__(self) -> None:
        self.retries = threading.Semaphore(0)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def call_at_boundary(self, function: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._calls.put(lambda: future.set_result(function()))
        return future

    def retry_adapters(self) -> None:
        self.retries.release()

    def stop(self) -> None:
        self._calls.put(None)
        self._thread.join()


class Swaps:
    """What the metrics are told."""

    def __init__(self) -> None:
        self.phases: list[AdapterPhase] = []
        self.failures: list[LoadFailure] = []

    def listen(self, event: EngineEvent) -> None:
        if isinstance(event, AdapterPhaseDone):
            assert event.seconds >= 0
            self.phases.append(event.phase)
        elif isinstance(event, AdapterLoadFailed):
            self.failures.append(event.reason)


class World:
    def __init__(self, slots: int = 3, wait_seconds: float = 5.0, turn_seconds: float = 1.0) -> None:
        self.swaps = Swaps()
        self.events = EventStream(self.swaps.listen)
        self.registry = FakeRegistry()
        self.lora = FakeLora()
        self.loop = FakeLoop()
        self.manager = AdapterManager(
            cast(Any, self.registry),
            None,
            AdapterLoader(
                cast(Any, self.registry), cast(Any, self.lora), self._bind, base_digest="base", events=self.events
            ),
            AdapterLimits(slots, poll_seconds=60.0, wait_seconds=wait_seconds, turn_seconds=turn_seconds),
            self.events,
        )

    def _bind(self, files: Mapping[str, bytes]) -> Any:
        name = files["weights"].decode()
        if name in self.registry.corrupt:
            raise AdapterRejected("tensor x is missing")
        return name

    def start(self) -> World:
        self.manager.start(self.loop)
        return self

    def pin(self, choice: AdapterChoice) -> AdapterPin:
        """Pins like the engine loop does: asks again whenever it is told to."""
        for _ in range(20):
            pin = self.manager.pin(choice)
            if pin is not None:
                return pin
            assert self.loop.retries.acquire(timeout=5.0), "never told to try again"
        raise AssertionError("still loading after 20 tries")

    def publish(self, name: str, *, attach: bool = True) -> AdapterVersion:
        version = AdapterVersion(name, self.registry.current_versions.get(name, 0) + 1)
        self.registry.current_versions[name] = version.version
        if attach:
            self.registry.attachment = version
        return version

    def sync(self, version: AdapterVersion | None = None, timeout: float = 5.0) -> None:
        self.manager.sync(version, timeout)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.manager.stop()
    world.loop.stop()


def named(name: str, version: int | None = None) -> AdapterChoice:
    return AdapterChoice(name=name, version=version)


def test_nothing_attached_is_the_base(world: World) -> None:
    world.start()
    assert world.manager.pin(ATTACHED) == BASE_PIN
    assert world.manager.pin(AdapterChoice()) == BASE_PIN


def test_the_attached_version_serves_from_the_start(world: World) -> None:
    world.publish("a")
    world.start()
    pin = world.manager.pin(ATTACHED)
    assert pin is not None
    assert (pin.version, pin.digest) == ("a@1", "digest a@1")
    assert world.lora.slots[pin.slot] == "a@1"


def test_a_swap_keeps_pinned_versions(world: World) -> None:
    world.publish("a")
    world.start()
    old = world.pin(ATTACHED)
    world.publish("a")
    world.sync()
    new = world.pin(ATTACHED)
    assert (old.version, new.version) == ("a@1", "a@2")
    assert world.lora.slots[old.slot] == "a@1"
    assert world.pin(named("a")).version == "a@2"
    assert world.pin(named("a", 1)) == old
    loaded = {item.pin.version: item.requests for item in world.manager.snapshot().loaded}
    assert loaded == {"a@1": 2, "a@2": 2}


def test_a_corrupt_version_leaves_the_old_one_live(world: World) -> None:
    world.publish("a")
    world.start()
    world.pin(named("a"))
    bad = world.publish("a")
    world.registry.corrupt.add(str(bad))
    world.sync()
    assert world.pin(ATTACHED).version == "a@1"
    assert world.pin(named("a")).version == "a@1"
    with pytest.raises(AdapterRejected, match="a@2: tensor x is missing"):
        world.sync(bad)
    with pytest.raises(AdapterRejected, match="tensor x"):
        world.pin(named("a", 2))
    world.publish("a")
    world.sync()
    assert world.pin(ATTACHED).version == "a@3"


def test_an_adapter_of_another_base_is_refused(world: World) -> None:
    world.start()
    world.registry.foreign.add(str(world.publish("a", attach=False)))
    with pytest.raises(AdapterRejected, match="another base model"):
        world.pin(named("a"))


def test_detach(world: World) -> None:
    world.publish("a")
    world.start()
    world.registry.attachment = None
    world.sync()
    assert world.manager.pin(ATTACHED) == BASE_PIN
    assert world.pin(named("a")).version == "a@1"


def test_unknown_names_are_asked_for_once(world: World) -> None:
    world.start()
    for _ in range(3):
        with pytest.raises(ModelNotFound, match="nobody"):
            world.pin(named("nobody"))
        with pytest.raises(ModelNotFound, match="nobody@7"):
            world.pin(named("nobody", 7))
    assert world.registry.calls.count("current nobody") == 1
    assert world.registry.calls.count("manifest nobody@7") == 1


def test_a_name_that_appears_after_a_miss(world: World) -> None:
    world.start()
    with pytest.raises(ModelNotFound):
        world.pin(named("a"))
    world.publish("a", attach=False)
    world.sync()
    assert world.pin(named("a")).version == "a@1"


def test_least_recently_used_versions_make_room_but_never_pinned_or_attached_ones(world: World) -> None:
    world.publish("a")
    world.start()
    world.publish("b", attach=False)
    world.publish("c", attach=False)
    world.publish("d", attach=False)
    held = world.pin(named("b"))
    world.manager.release(world.pin(named("c")))
    assert world.pin(named("d")).slot not in {held.slot, world.pin(ATTACHED).slot}
    assert {item.pin.version for item in world.manager.snapshot().loaded} == {"a@1", "b@1", "d@1"}
    assert world.registry.calls.count("files a@1") == 1


def test_no_free_slot_waits_for_a_request_to_end(world: World) -> None:
    world.start()
    pins = []
    for name in "abc":
        world.publish(name, attach=False)
        pins.append(world.pin(named(name)))
    world.publish("d", attach=False)
    assert world.manager.pin(named("d")) is None
    assert not world.loop.retries.acquire(timeout=0.2)
    world.manager.release(pins[1])
    assert world.pin(named("d")).slot == pins[1].slot


def test_what_metrics_see_of_a_swap(world: World) -> None:
    world.publish("a")
    world.start()
    assert world.swaps.phases == ["download", "bind", "upload", "flip"]
    world.publish("b", attach=False)
    world.registry.corrupt.add("b@1")
    with pytest.raises(AdapterRejected):
        world.pin(named("b"))
    with pytest.raises(ModelNotFound):
        world.pin(named("a", 9))
    assert world.swaps.failures == ["rejected", "missing"]


def test_routers_see_what_is_loaded_and_what_is_waited_for_by_the_names_that_clients_use() -> None:
    world = World(slots=2).start()
    for name in "ab":
        world.publish(name, attach=False)
        world.pin(named(name))
    world.publish("a", attach=False)
    world.publish("c", attach=False)
    assert world.manager.pin(named("c")) is None
    assert world.manager.pin(named("b", 7)) is None
    snapshot = world.manager.snapshot()
    assert snapshot.serving == ("a", "b")
    assert snapshot.waiting == ("b@7", "c")
    assert world.swaps.failures == []
    world.manager.stop()
    world.loop.stop()


def test_a_version_that_is_not_current_is_shown_with_its_number(world: World) -> None:
    world.publish("a")
    world.publish("a")
    world.start()
    world.pin(named("a", 1))
    assert world.manager.snapshot().serving == ("a", "a@1")


def full(slots: int, **limits: float) -> tuple[World, list[AdapterPin]]:
    """A world whose slots are all in use, and the pins."""
    world = World(slots, **limits).start()
    pins = []
    for name in "abcdefgh"[:slots]:
        world.publish(name, attach=False)
        pins.append(world.pin(named(name)))
    return world, pins


@contextmanager
def in_use(slots: int, **limits: float) -> Iterator[tuple[World, list[AdapterPin]]]:
    world, pins = full(slots, **limits)
    yield world, pins
    world.manager.stop()
    world.loop.stop()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_what_lacks_a_slot_for_too_long_is_told_so() -> None:
    with in_use(2, wait_seconds=0.5) as (world, _):
        world.publish("c", attach=False)
        assert world.manager.pin(named("c")) is None
        until(lambda: named("c") in world.manager._table.queue)
        error = world.manager.overdue(named("c"))
        assert isinstance(error, Overloaded)
        assert "all 2 adapter slots are in use, and none became free in 0.5 s" in error.message
        assert "TEMPER_ADAPTER_SLOTS" in error.message
        assert world.swaps.failures == ["no_slot"]


def test_what_is_loaded_slowly_is_not_told_that_it_lacks_a_slot(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish("a", attach=False)
    world.start()
    go_on = threading.Event()
    files = world.registry.files
    monkeypatch.setattr(world.registry, "files", lambda version: go_on.wait(20) and files(version))
    assert world.manager.pin(named("a")) is None
    until(lambda: "manifest a@1" in world.registry.calls)
    error = world.manager.overdue(named("a"))
    assert isinstance(error, Unavailable)
    assert "no slot was missing" in error.message
    assert world.swaps.failures == []
    go_on.set()


def test_a_version_without_a_slot_is_served_however_many_requests_others_get() -> None:
    """Each of two versions has a request at all times, and a new one before its last has ended."""
    with in_use(2, turn_seconds=0.01) as (world, held):
        world.publish("c", attach=False)
        of = {"a": [held[0]], "b": [held[1]]}
        refused: set[str] = set()
        waiting = None
        while waiting is None:
            for name, pins in of.items():
                pin = world.manager.pin(named(name))
                if pin is None:
                    refused.add(name)
                else:
                    pins.append(pin)
                if pins:
                    world.manager.release(pins.pop(0))
            assert of["a"] or of["b"], "both gave way to one"
            time.sleep(0.001)
            waiting = world.manager.pin(named("c"))
        assert waiting.version == "c@1"
        assert refused, "nobody gave way"


def test_versions_are_served_in_the_order_in_which_they_began_to_wait() -> None:
    with in_use(2) as (world, held):
        for name in "cd":
            world.publish(name, attach=False)
        assert world.manager.pin(named("c")) is None
        until(lambda: named("c") in world.manager._table.queue)
        assert world.manager.pin(named("d")) is None
        until(lambda: named("d") in world.manager._table.queue)
        world.manager.release(held[0])
        until(lambda: world.lora.slots[held[0].slot] == "c@1")
        # Also one that was there before: it gave way, and stands behind those that waited.
        assert world.manager.pin(named("a")) is None
        until(lambda: named("a") in world.manager._table.queue)
        world.manager.release(held[1])
        until(lambda: world.lora.slots[held[1].slot] == "d@1")
        world.manager.release(world.pin(named("c")))
        assert world.pin(named("a")).slot == held[0].slot


def test_versions_go_on_when_nobody_waits_for_their_slots_any_more() -> None:
    """Whoever waited has given up: who gave way is told to try again."""
    with in_use(2, turn_seconds=0.0) as (world, held):
        world.publish("c", attach=False)
        assert world.manager.pin(named("c")) is None
        until(lambda: named("c") in world.manager._table.queue)
        assert world.manager.pin(named("a")) is None
        world.manager.give_up(named("c"))
        assert world.pin(named("a")) == held[0]
        assert list(world.manager._table.queue) == []


def test_nobody_gives_way_to_what_is_not_there() -> None:
    with in_use(2) as (world, held):
        world.manager.release(held[0])
        for name in ("nobody", "a"):
            with pytest.raises(ModelNotFound):
                world.pin(named(name, 99))
        world.registry.away = True
        with pytest.raises(Unavailable):
            world.pin(named("c"))
        assert [loaded.pin for loaded in world.manager.snapshot().loaded] == held
        assert list(world.manager._table.queue) == []


def test_a_swap_waits_for_a_slot_while_the_old_version_serves() -> None:
    world = World(slots=2)
    world.publish("a")
    world.start()
    first = world.pin(ATTACHED)
    world.publish("a")
    world.sync()
    second = world.pin(ATTACHED)
    world.publish("a")
    with pytest.raises(Overloaded):
        world.sync(timeout=0.2)
    assert world.pin(ATTACHED).version == "a@2"
    world.manager.release(first)
    deadline = time.monotonic() + 5
    while world.manager.snapshot().attached != "a@3":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert world.pin(ATTACHED).slot == first.slot != second.slot
    world.manager.stop()
    world.loop.stop()


def test_a_sync_waits_for_pointers_that_are_not_live_whatever_else_is_asked_for_meanwhile() -> None:
    with in_use(2) as (world, held):
        world.registry.attachment = world.publish("c", attach=False)
        done = threading.Thread(target=world.sync, daemon=True)
        done.start()
        until(lambda: world.manager._table.queue)
        for name in "xyz":
            with pytest.raises(ModelNotFound):
                world.pin(named(name))
        assert done.is_alive()
        world.manager.release(held[0])
        done.join(5)
        assert not done.is_alive()
        assert world.manager.snapshot().attached == "c@1"


class FailingNudges:
    """Fails once as no client of Redis should, then tells of an event."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, timeout: float) -> bool:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("a bug")
        time.sleep(0.01)
        return True


def test_a_bug_in_waiting_for_events_does_not_end_the_thread() -> None:
    registry, nudges, loop = FakeRegistry(), FailingNudges(), FakeLoop()
    loader = AdapterLoader(cast(Any, registry), cast(Any, FakeLora()), lambda files: cast(Any, files), base_digest="")
    manager = AdapterManager(cast(Any, registry), nudges, loader, AdapterLimits(2, 0.1, 5.0))
    manager.start(loop)
    until(lambda: nudges.waits > 2)
    manager.stop()
    loop.stop()


def test_a_slow_store_is_not_called_a_lack_of_slots(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish("a", attach=False)
    world.start()
    go_on = threading.Event()
    files = world.registry.files
    monkeypatch.setattr(world.registry, "files", lambda version: go_on.wait(20) and files(version))
    with pytest.raises(Unavailable, match=r"a@1 was not loaded within 0.2 s, although no slot was missing"):
        world.manager.sync(AdapterVersion("a", 1), timeout=0.2)
    go_on.set()
    world.manager.sync(AdapterVersion("a", 1), timeout=20)


def test_a_slow_store_is_not_called_a_lack_of_slots_at_the_start(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    pointers = world.registry.pointers
    monkeypatch.setattr(world.registry, "pointers", lambda: go_on.wait(20) and pointers())
    monkeypatch.setattr("services.engine.adapters.manager._START_SECONDS", 0.2)
    with pytest.raises(Unavailable, match="what is attached was not loaded within"):
        world.start()
    go_on.set()


def test_slots_that_stay_in_use_are_named_behind_a_store_that_was_slow() -> None:
    world = World(slots=1).start()
    world.publish("a", attach=False)
    world.publish("b", attach=False)
    pin = world.pin(named("a"))
    with pytest.raises(Overloaded, match="TEMPER_ADAPTER_SLOTS"):
        world.manager.sync(AdapterVersion("b", 1), timeout=0.3)
    world.manager.release(pin)
    world.manager.stop()
    world.loop.stop()


def test_an_outage_keeps_what_is_loaded(world: World) -> None:
    world.publish("a")
    world.start()
    world.registry.away = True
    with pytest.raises(Unavailable):
        world.sync()
    assert world.pin(ATTACHED).version == "a@1"
    assert world.pin(named("a")).version == "a@1"
    with pytest.raises(Unavailable):
        world.pin(named("b"))
    world.registry.away = False
    world.publish("a")
    world.sync()
    assert world.pin(ATTACHED).version == "a@2"


def test_one_timeout_answers_for_all_names_that_wait(world: World) -> None:
    world.start()
    world.registry.away = True
    before = len(world.registry.calls)
    for n in range(20):
        with pytest.raises(Unavailable):
            world.pin(AdapterChoice(name=f"n{n}"))
    assert len(world.registry.calls) <= before + 2
    world.registry.away = False
    world.publish("n3")
    world.sync()
    with pytest.raises(ModelNotFound):
        world.pin(AdapterChoice(name="n20"))
    assert world.pin(AdapterChoice(name="n3")).version == "n3@1"


def test_an_outage_at_the_start_is_an_error(world: World) -> None:
    world.registry.away = True
    with pytest.raises(Unavailable):
        world.start()


def test_a_deleted_adapter_is_forgotten_when_its_last_request_ends(world: World) -> None:
    world.start()
    world.publish("a", attach=False)
    pin = world.pin(named("a"))
    del world.registry.current_versions["a"]
    world.sync()
    assert world.manager.snapshot().loaded == ()
    with pytest.raises(ModelNotFound):
        world.pin(named("a"))
    world.manager.release(pin)
    for name in "bcd":
        world.publish(name, attach=False)
        world.pin(named(name))


def test_a_rollback_is_a_swap(world: World) -> None:
    world.publish("a")
    world.publish("a")
    world.start()
    assert world.pin(ATTACHED).version == "a@2"
    world.registry.attachment = AdapterVersion("a", 1)
    world.sync()
    assert world.pin(ATTACHED).version == "a@1"


def test_a_bug_in_the_store_client_does_not_end_the_thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start()

    def broken() -> Pointers:
        raise KeyError("bug")

    with monkeypatch.context() as patch:
        patch.setattr(world.registry, "pointers", broken)
        with pytest.raises(TemperError, match="KeyError"):
            world.sync()
    world.publish("a")
    world.sync()
    assert world.pin(ATTACHED).version == "a@1"


def test_a_bug_in_loading_for_a_sync_does_not_end_the_thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.registry.current_versions = {"a": 1}
    world.start()

    def broken(slot: int, bound: str) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(world.lora, "load", broken)
        with pytest.raises(TemperError, match="RuntimeError"):
            world.manager.sync(AdapterVersion("a", 1), timeout=5)
    world.manager.sync(AdapterVersion("a", 1), timeout=5)
    assert world.pin(AdapterChoice(name="a")).version == "a@1"
