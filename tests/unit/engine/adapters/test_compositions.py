"""Compositions in the adapter manager: resolved and pinned as one, loaded and swapped like a version."""

from __future__ import annotations

import pytest

from services.common.adapters.composition import Composition, Member, parse_composition
from services.common.adapters.names import AdapterVersion
from services.common.errors import AdapterRejected, ModelNotFound
from services.engine.requests.adapter import AdapterChoice
from tests.unit.engine.adapters.adapter_world import World, in_use, named, until, world

__all__ = ["world"]


def composed(text: str) -> AdapterChoice:
    return AdapterChoice.of(parse_composition(text))


@pytest.fixture
def ab(world: World) -> World:
    world.publish("a", attach=False)
    world.publish("b", attach=False)
    return world.start()


def test_a_composition_takes_one_slot_whatever_the_order_of_its_members(ab: World) -> None:
    pin = ab.pin(composed("a*0.5+b"))
    assert pin.version == "a@1*0.5+b@1"
    assert ab.lora.slots == {pin.slot: "a@1*0.5 b@1*1"}
    assert ab.pin(composed("b@1+a@1*0.5")) == pin
    snapshot = ab.manager.snapshot()
    assert [(item.pin.version, item.requests) for item in snapshot.loaded] == [("a@1*0.5+b@1", 2)]
    assert snapshot.serving == ("a*0.5+b",)


def test_cache_keys_tell_compositions_apart_by_members_and_scales(ab: World) -> None:
    pins = [ab.pin(composed(text)) for text in ("a+b", "a*0.5+b", "a+b*0.5")]
    assert len({pin.digest for pin in pins}) == 3
    again = Composition((Member("x", 7), Member("y", 9, 0.5)))
    turned = Composition((Member("x", 7, 0.5), Member("y", 9)))
    assert again.digest(["one", "two"]) == turned.digest(["two", "one"]), "by content, not by names"


def test_one_adapter_with_the_scale_1_is_that_adapter(ab: World) -> None:
    assert ab.pin(composed("a@1*1")) == ab.pin(named("a"))
    assert ab.pin(composed("a*0.25")).version == "a@1*0.25"


def test_a_new_version_of_a_member_is_loaded_before_the_name_means_it(ab: World) -> None:
    old = ab.pin(composed("a+b"))
    fixed = composed("a@1+b")
    ab.pin(fixed)
    ab.publish("a", attach=False)
    ab.sync()
    new = ab.manager.pin(composed("a+b"))
    assert new is not None, "it was loaded with the swap"
    assert (old.version, new.version) == ("a@1+b@1", "a@2+b@1")
    assert ab.lora.slots[old.slot] == "a@1*1 b@1*1"
    assert ab.manager.pin(fixed) == old


def test_a_version_that_does_not_fit_beside_others_goes_live_by_itself(ab: World) -> None:
    ab.pin(composed("a+b"))
    ab.max_members = 1
    ab.publish("a", attach=False)
    ab.sync()
    assert ab.pin(named("a")).version == "a@2"
    with pytest.raises(AdapterRejected, match=r"^the ranks are too many"):
        ab.pin(composed("a+b"))
    assert ab.pin(composed("a@1+b@1")).version == "a@1+b@1"


def test_nothing_gives_way_to_a_composition_that_does_not_fit() -> None:
    with in_use(2) as (world, pins):
        world.max_members = 1
        for pin in pins:
            world.manager.release(pin)
        with pytest.raises(AdapterRejected, match="the ranks are too many"):
            world.pin(composed("a+b"))
        assert set(world.lora.slots.values()) == {"a@1", "b@1"}
        assert world.manager.pin(named("a")) == pins[0]


def test_a_member_that_is_missing_or_corrupt_is_named(ab: World) -> None:
    with pytest.raises(ModelNotFound, match="no; GET /v1/models"):
        ab.pin(composed("a+nope"))
    ab.registry.corrupt.add("b@1")
    with pytest.raises(AdapterRejected, match=r"^b@1: tensor x is missing"):
        ab.pin(composed("a+b"))
    assert ab.pin(named("a")).version == "a@1"


def test_a_deleted_member_ends_its_compositions(ab: World) -> None:
    ab.pin(composed("a+b"))
    del ab.registry.current_versions["b"]
    ab.sync()
    with pytest.raises(ModelNotFound):
        ab.pin(composed("a@1+b@1"))


def test_a_composition_waits_for_a_slot_like_a_version() -> None:
    with in_use(2) as (world, pins):
        assert world.manager.pin(composed("a+b")) is None
        until(lambda: world.manager.snapshot().waiting == ("a+b",))
        world.manager.release(pins[0])
        assert world.pin(composed("a+b")).version == "a@1+b@1"


def test_a_composition_in_use_does_not_delay_new_versions_without_a_slot() -> None:
    with in_use(1) as (world, pins):
        world.manager.release(pins[0])
        world.publish("b", attach=False)
        first = world.pin(composed("a+b"))
        version = world.publish("b", attach=False)
        world.sync(None)
        assert world.manager.pin(composed("a+b")) is None
        world.manager.release(first)
        assert world.pin(composed("a+b")).version == f"a@1+{AdapterVersion('b', version.version)}"
