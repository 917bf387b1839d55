"""Policies of training jobs in the adapter slots: unfindable by clients, never evicted, gone at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from services.common.adapters.names import AdapterVersion, check_adapter_name
from services.common.errors import AdapterRejected, InvalidRequest, ModelNotFound, Overloaded
from services.common.pb import engine_pb2 as pb
from services.engine.requests.adapter import AdapterChoice, AdapterPin
from services.engine.server.protobuf import adapter_choice
from tests.unit.engine.adapters.adapter_world import World

FILES = {"weights": b"policy"}


def nothing() -> None:
    pass


@pytest.fixture
def world() -> Iterator[World]:
    world = World(slots=2, wait_seconds=0.3).start()
    yield world
    world.manager.stop()
    world.loop.stop()


def test_a_policy_is_pinned_by_its_handle_while_it_is_loaded(world: World) -> None:
    with world.manager.private.loaded(FILES, nothing) as policy:
        pin = world.manager.pin(policy)
        assert pin is not None
        assert world.lora.slots[pin.slot] == "policy"
        assert pin.digest == policy.digest
        world.manager.release(pin)
    with pytest.raises(ModelNotFound, match="removed from its slot"):
        world.manager.pin(policy)


def test_every_policy_has_cache_keys_of_its_own(world: World) -> None:
    digests = set()
    for _ in range(3):
        with world.manager.private.loaded(FILES, nothing) as policy:
            digests.add(policy.digest)
    assert len(digests) == 3


def test_no_client_can_name_a_policy(world: World) -> None:
    with world.manager.private.loaded(FILES, nothing) as policy:
        assert world.manager.snapshot().loaded == ()
        with pytest.raises(InvalidRequest):
            check_adapter_name(str(policy))
        message = pb.GenerateRequest(adapter=pb.AdapterRef(named=pb.NamedAdapter(name=str(policy))))
        with pytest.raises(InvalidRequest):
            adapter_choice(message)
        # Also behind the wire, a choice by that name is another one.
        world.manager.pin(AdapterChoice(name="x"))
        assert AdapterChoice(name=policy.digest) != policy


def test_a_policy_is_not_evicted_for_another_adapter(world: World) -> None:
    versions = [world.publish(name, attach=False) for name in ("a", "b", "c")]
    with world.manager.private.loaded(FILES, nothing) as policy:
        for version in versions:
            pin = world.pin(AdapterChoice(name=version.name))
            world.manager.release(pin)
        pinned = world.manager.pin(policy)
        assert pinned is not None
        assert world.lora.slots[pinned.slot] == "policy"
        world.manager.release(pinned)
    # Its slot is free again: two versions fit.
    world.pin(AdapterChoice(name="a"))
    world.pin(AdapterChoice(name="b"))


def test_without_a_slot_the_job_is_told_what_to_do(world: World) -> None:
    for name in ("a", "b"):
        world.publish(name, attach=False)
        world.pin(AdapterChoice(name=name))
    with pytest.raises(Overloaded, match="TEMPER_ADAPTER_SLOTS"), world.manager.private.loaded(FILES, nothing):
        raise AssertionError("there is no slot")


def test_waiting_for_a_slot_ends_when_one_is_free_or_the_job_is_interrupted(world: World) -> None:
    for name in ("a", "b"):
        world.publish(name, attach=False)
    first, _ = (world.pin(AdapterChoice(name=name)) for name in ("a", "b"))

    class Cancelled(Exception):
        pass

    def cancel() -> None:
        raise Cancelled

    with pytest.raises(Cancelled), world.manager.private.loaded(FILES, cancel):
        raise AssertionError("there is no slot")
    threading.Timer(0.1, world.manager.release, [first]).start()
    with world.manager.private.loaded(FILES, nothing) as policy:
        assert world.manager.pin(policy) is not None


def test_the_slot_comes_back_however_the_block_ends(world: World) -> None:
    with pytest.raises(KeyError), world.manager.private.loaded(FILES, nothing):
        raise KeyError("a bug in the job")
    world.registry.corrupt.add("bad")
    with pytest.raises(AdapterRejected), world.manager.private.loaded({"weights": b"bad"}, nothing):
        raise AssertionError("it does not bind")
    table = world.manager._table
    assert sorted(table._free) == [1, 2]


def test_requests_that_are_pinned_end_with_the_old_policy(world: World) -> None:
    with world.manager.private.loaded(FILES, nothing) as policy:
        pin = world.manager.pin(policy)
    assert isinstance(pin, AdapterPin)
    with world.manager.private.loaded({"weights": b"next"}, nothing) as following:
        newer = world.manager.pin(following)
        assert newer is not None
        assert newer.slot != pin.slot
        assert world.lora.slots[pin.slot] == "policy"
        world.manager.release(pin)
        world.manager.release(newer)
    assert sorted(world.manager._table._free) == [1, 2]


def test_a_waiting_request_gets_the_slot_of_a_policy_that_left(world: World) -> None:
    for name in ("a", "b"):
        world.publish(name, attach=False)
    world.pin(AdapterChoice(name="a"))
    with world.manager.private.loaded(FILES, nothing):
        assert world.manager.pin(AdapterChoice(name="b")) is None
    assert world.pin(AdapterChoice(name="b")).version == str(AdapterVersion("b", 1))
