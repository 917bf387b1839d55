"""The adapter manager against a registry in memory; real threads, no torch."""

from __future__ import annotations

import pytest

from services.common.errors import (
    AdapterRejected,
    ModelNotFound,
)
from services.engine.requests.adapter import BASE_PIN, AdapterChoice
from tests.unit.engine.adapters.adapter_world import (
    ATTACHED,
    World,
    named,
)


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
