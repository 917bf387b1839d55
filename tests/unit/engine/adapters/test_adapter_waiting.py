"""Adapter waiting."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest

from services.common.errors import (
    AdapterRejected,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from services.engine.adapters.loader import AdapterLoader
from services.engine.adapters.manager import AdapterManager
from services.engine.adapters.slot_table import AdapterConfig
from tests.unit.engine.adapters.adapter_world import (
    ATTACHED,
    FailingNudges,
    FakeLoop,
    FakeLora,
    FakeRegistry,
    World,
    in_use,
    named,
    until,
)


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
    until(lambda: world.manager.snapshot().attached == "a@3")
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
        done.join(30)
        assert not done.is_alive()
        assert world.manager.snapshot().attached == "c@1"


def test_a_bug_in_waiting_for_events_does_not_end_the_thread() -> None:
    registry, nudges, loop = FakeRegistry(), FailingNudges(), FakeLoop()
    loader = AdapterLoader(cast(Any, registry), cast(Any, FakeLora()), cast(Any, None), base_digest="")
    manager = AdapterManager(cast(Any, registry), nudges, loader, AdapterConfig(2, 0.1, 5.0))
    manager.start(loop)
    until(lambda: nudges.waits > 2)
    manager.stop()
    loop.stop()
