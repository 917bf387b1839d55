"""Adapter outages."""

from __future__ import annotations

import threading

import pytest

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import Pointers
from services.common.errors import (
    ModelNotFound,
    Overloaded,
    TemperError,
    Unavailable,
)
from services.engine.requests.adapter import AdapterChoice
from tests.unit.engine.adapters.adapter_world import (
    ATTACHED,
    World,
    named,
)


def test_a_slow_store_is_not_called_a_lack_of_slots(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish("a", attach=False)
    world.start()
    go_on = threading.Event()
    files = world.registry.files
    monkeypatch.setattr(world.registry, "files", lambda version: go_on.wait(20) and files(version))
    with pytest.raises(Unavailable, match=r"a@1 was not loaded in 0.2 s, although no slot was missing"):
        world.manager.sync(AdapterVersion("a", 1), timeout=0.2)
    go_on.set()
    world.manager.sync(AdapterVersion("a", 1), timeout=20)


def test_a_slow_store_is_not_called_a_lack_of_slots_at_the_start(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    pointers = world.registry.pointers
    monkeypatch.setattr(world.registry, "pointers", lambda: go_on.wait(20) and pointers())
    monkeypatch.setattr("services.engine.adapters.manager._START_SECONDS", 0.2)
    with pytest.raises(Unavailable, match="the attached adapter was not loaded in"):
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
            world.manager.sync(AdapterVersion("a", 1), timeout=30)
    world.manager.sync(AdapterVersion("a", 1), timeout=30)
    assert world.pin(AdapterChoice(name="a")).version == "a@1"
