"""The drafter that an engine follows: what is loaded when, and what is refused, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from services.common.adapters.manifest import DRAFTER_CONFIG, DRAFTER_WEIGHTS
from services.common.adapters.registry import CONFIG, WEIGHTS, AdapterRegistry, Manifest, Pointers
from services.common.errors import AdapterRejected, Unavailable
from services.engine.adapters.drafter import AtBoundary, FollowedDrafter
from tests.unit.engine.adapters.adapter_world import ATTACHED
from tests.unit.engine.adapters.adapter_world import World as AdapterWorld
from tests.unit.gateway.fake_stores import MemoryStore


class Layer:
    """Stands for the mtp layer: what was written over it, and whether between two steps."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.between = False
        self.staged = 0

    def stage(self, files: Mapping[str, bytes]) -> Callable[[], None]:
        self.staged += 1
        if files[DRAFTER_WEIGHTS] == b"bad":
            raise AdapterRejected("tensor mtp.fc.weight is missing")

        def write() -> None:
            assert self.between
            self.written.append(files[DRAFTER_WEIGHTS])

        return write

    def at_boundary(self, function: Callable[[], None]) -> None:
        self.between = True
        function()
        self.between = False


class World:
    def __init__(self) -> None:
        self.store = MemoryStore()
        store: Any = self.store
        self.registry = AdapterRegistry(store, "model")
        self.layer = Layer()

    def publish(self, weights: bytes, name: str = "sharp", base: str = "base") -> Manifest:
        return self.registry.publish(name, {DRAFTER_WEIGHTS: weights, DRAFTER_CONFIG: b"{}"}, base_digest=base)

    def following(self, name: str = "sharp", number: int | None = None) -> FollowedDrafter:
        return FollowedDrafter(self.registry, name, number, self.layer.stage, base_digest="base")

    def look(self, drafter: FollowedDrafter) -> str:
        drafter.refresh(self.registry.pointers(), self.layer.at_boundary)
        return str(drafter.version)


@pytest.fixture
def world() -> World:
    return World()


def test_it_follows_the_pointer_forwards_and_back(world: World) -> None:
    drafter = world.following()
    assert world.look(drafter) == "None"
    world.publish(b"one")
    assert world.look(drafter) == world.look(drafter) == "sharp@1"
    world.publish(b"two")
    assert world.look(drafter) == "sharp@2"
    world.registry.rollback("sharp")
    assert world.look(drafter) == "sharp@1"
    assert world.layer.written == [b"one", b"two", b"one"]


def test_equal_files_are_not_loaded_again(world: World) -> None:
    drafter = world.following()
    world.publish(b"one")
    world.look(drafter)
    world.publish(b"one")
    assert world.look(drafter) == "sharp@2"
    assert world.layer.written == [b"one"]


def test_one_that_is_named_with_its_version_stays(world: World) -> None:
    world.publish(b"one")
    drafter = world.following(number=1)
    assert world.look(drafter) == "sharp@1"
    world.publish(b"two")
    assert world.look(drafter) == "sharp@1"
    assert world.layer.written == [b"one"]


def test_what_is_refused_is_not_tried_again_and_the_next_one_is(world: World) -> None:
    drafter = world.following()
    world.publish(b"one")
    world.look(drafter)
    world.publish(b"bad")
    assert world.look(drafter) == world.look(drafter) == "sharp@1"
    assert world.layer.staged == 2
    world.publish(b"three", base="another")
    assert world.look(drafter) == "sharp@1"
    world.publish(b"four")
    assert world.look(drafter) == "sharp@4"
    assert world.layer.written == [b"one", b"four"]


def test_an_adapter_of_that_name_does_not_draft(world: World) -> None:
    world.registry.publish("polite", {WEIGHTS: b"w", CONFIG: b"{}"}, base_digest="base")
    assert world.look(world.following("polite")) == "None"
    assert world.layer.staged == 0


def test_it_is_tried_again_when_the_store_is_back_and_when_a_boundary_comes(world: World) -> None:
    world.publish(b"one")
    drafter = world.following()
    pointers = world.registry.pointers()
    world.store.down = True
    with pytest.raises(Unavailable):
        drafter.refresh(pointers, world.layer.at_boundary)
    world.store.down = False

    def never(function: Callable[[], None]) -> None:
        raise Unavailable("the engine loop did not reach a step boundary")

    with pytest.raises(Unavailable):
        drafter.refresh(pointers, never)
    assert drafter.version is None
    assert world.look(drafter) == "sharp@1"


def test_a_deleted_one_drafts_on(world: World) -> None:
    drafter = world.following()
    world.publish(b"one")
    world.look(drafter)
    world.registry.delete("sharp")
    assert world.look(drafter) == "sharp@1"
    world.publish(b"new")
    assert world.look(drafter) == "sharp@2"


class Away:
    """A drafter whose files do not come, from some moment on."""

    version = None

    def __init__(self) -> None:
        self.away = False

    def refresh(self, pointers: Pointers, at_boundary: AtBoundary) -> None:
        if self.away:
            raise Unavailable("the store is away")


def test_one_that_does_not_come_holds_up_no_adapter() -> None:
    drafter = Away()
    world = AdapterWorld(drafter=drafter).start()
    try:
        drafter.away = True
        world.publish("a")
        with pytest.raises(Unavailable, match="the store is away"):
            world.sync()
        assert world.pin(ATTACHED).version == "a@1"
        drafter.away = False
        world.sync()
    finally:
        world.manager.stop()
        world.loop.stop()
