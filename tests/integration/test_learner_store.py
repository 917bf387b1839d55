"""Learners on a real Valkey: one write a turn, fences, events, and controllers that race."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis

from services.common.errors import Conflict, NewerSchema, NotFound
from services.common.settings import CommonSettings
from services.common.storage.lease import LeaseLost
from services.learning.learners.policy import LearnerPolicy
from services.learning.learners.record import Cycle, NewEvent
from services.learning.learners.steps import next_step
from services.learning.learners.store import ROOT, LearnerStore, NewLearner
from tests.integration.servers import RunningServer
from tests.unit.learning.test_learners import Process, World

Open = Callable[[], LearnerStore]
BEGUN = Cycle(entered_at=1.0)


def policy(name: str = "l", **more: Any) -> LearnerPolicy:
    return LearnerPolicy.model_validate(
        {"name": name, "adapter": "a", "method": "sft", "trigger": {"min_rows": 1}, "budget": {"jobs": None}, **more}
    )


def said(kind: Any = "preparing") -> NewEvent:
    return NewEvent(kind=kind, detail="so", cycle=1, evidence={"rows": [1]})


@pytest.fixture
async def opened(valkey: RunningServer, settings: CommonSettings) -> AsyncIterator[Open]:
    stores: list[LearnerStore] = []

    def make() -> LearnerStore:
        stores.append(LearnerStore(settings))
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()


async def test_one_write_a_turn(opened: Open, raw: redis.Redis) -> None:
    store = opened()
    first = await store.create(NewLearner(policy(), "key-1", everybodys=True), BEGUN, said("collecting"))
    assert (first.revision, first.turn, first.key_id, first.traffic_of) == (1, 1, "key-1", None)
    with pytest.raises(Conflict, match="exists"):
        await store.create(NewLearner(policy()), BEGUN)
    begun = BEGUN.model_copy(update={"number": 1, "state": "preparing"})
    second = await store.write(first, begun, [said(), said("data")])
    assert (second.turn, second.cycle, second.revision) == (2, begun, 1)
    assert (await store.write(first, begun, [said(), said("data")])).turn == 2, "an answer that was lost"
    with pytest.raises(Conflict, match="changed meanwhile"):
        await store.write(first, BEGUN)
    third = await store.write(second, begun, policy=policy(stop_after=7))
    assert (third.revision, third.policy.stop_after, third.changed_at > first.changed_at) == (2, 7, True)
    events = await store.events(third, limit=2)
    assert [event.kind for event in events] == ["data", "preparing"]
    assert events[0].evidence == {"rows": [1]}
    rest = await store.events(third, limit=9, after=events[-1].id)
    assert [event.kind for event in rest] == ["collecting"]
    await store.create(NewLearner(policy("b")), BEGUN)
    assert [one.name for one in await store.all()] == ["b", "l"]
    assert await store.delete(third)
    assert not await store.delete(third)
    with pytest.raises(NotFound):
        await store.write(third, begun)
    again = await store.create(NewLearner(policy()), BEGUN)
    with pytest.raises(NotFound):
        await store.write(third, begun)
    assert await store.events(again, limit=9) == []
    raw.hset(f"{ROOT}l", "schema", "2")
    with pytest.raises(NewerSchema):
        await store.get("l")


async def test_a_controller_of_the_past_writes_nothing(opened: Open) -> None:
    store, other = opened(), opened()
    learner = await store.create(NewLearner(policy()), BEGUN)
    lease = store.lease(0.05)
    past = await lease.hold()
    await asyncio.sleep(0.1)
    now = await other.lease(30).hold()
    assert past is not None
    assert now is not None
    with pytest.raises(LeaseLost):
        await store.write(learner, BEGUN, [said()], fence=past)
    assert await lease.hold() is None
    assert (await other.write(learner, BEGUN, [said()], fence=now)).turn == 2
    assert len(await store.events(learner, limit=9)) == 1


async def test_people_and_controllers_do_not_undo_each_other(opened: Open) -> None:
    """Two controllers that both believe they act, and somebody who pauses and resumes: everything happens once."""
    stores, world = [opened() for _ in range(3)], World(["promoted", "rolled_back"])
    await stores[0].create(NewLearner(policy(canary={"share": 0.5})), BEGUN)
    ended = asyncio.Event()

    async def act(store: LearnerStore) -> None:
        process = Process(world)
        while (learner := await store.get("l")).cycle.number < 3:
            step = await next_step(learner, process, 1e9)
            if step is not None:
                try:
                    await store.write(learner, step.cycle, step.events)
                except Conflict:
                    continue
            await asyncio.sleep(0)
        ended.set()

    async def meddle(store: LearnerStore) -> None:
        while not ended.is_set():
            await store.change("l", lambda one: (one.cycle.model_copy(update={"paused": True}), [said("paused")]))
            await store.change("l", lambda one: (one.cycle.model_copy(update={"paused": False}), [said("resumed")]))

    await asyncio.wait_for(asyncio.gather(act(stores[0]), act(stores[1]), meddle(stores[2])), 60)
    assert world.made
    assert set(world.made.values()) == {1}
    learner = await stores[0].get("l")
    kinds = [
        event.kind for event in await stores[0].events(learner, limit=2000) if event.kind not in ("paused", "resumed")
    ]
    assert kinds[::-1][:6] == ["preparing", "data", "training", "canary", "canary", "promoted"]
    assert kinds.count("promoted") == kinds.count("rolled_back") == 1
