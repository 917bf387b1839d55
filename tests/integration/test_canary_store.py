"""Store of canaries on a real Valkey: one an adapter, decided once, told to gateways while somebody watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis

from services.common.errors import Conflict, NewerSchema, NotFound
from services.common.evaluation.statistics.sequential import Observed
from services.common.settings import CommonSettings
from services.common.storage.lease import LeaseLost
from services.learning.canaries.policy import CanaryPolicy
from services.learning.canaries.record import (
    ArmEvidence,
    CanaryEvidence,
    CanaryRecord,
    Decision,
    LookEvidence,
    NewCanary,
    new_canary_id,
)
from services.learning.canaries.store import ROOT, CanaryFilter, CanaryStore
from tests.integration.servers import RunningServer

ALL = CanaryFilter()
PROMOTE = Decision(outcome="promote", reason="better", detail="it is better")
ROLL_BACK = Decision(outcome="roll_back", reason="person", detail="no", by="key-1")


@pytest.fixture
async def opened(valkey: RunningServer, settings: CommonSettings) -> AsyncIterator[Callable[[], CanaryStore]]:
    stores: list[CanaryStore] = []

    def make() -> CanaryStore:
        stores.append(CanaryStore(settings))
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()


def new(adapter: str = "toy", candidate: int = 2, **fields: Any) -> NewCanary:
    values: dict[str, Any] = {
        "id": new_canary_id(),
        "adapter": adapter,
        "current": f"{adapter}@1",
        "candidate": f"{adapter}@{candidate}",
        "attached": True,
        "policy": CanaryPolicy(share=0.25),
    }
    return NewCanary(**(values | fields))


def evidence(at: float = 1.0) -> CanaryEvidence:
    look = CanaryPolicy().test.look(Observed(), Observed())
    return CanaryEvidence(
        at=at, look=LookEvidence.of(look), current=ArmEvidence(version="toy@1"), candidate=ArmEvidence(version="toy@2")
    )


async def fence_of(store: CanaryStore) -> int:
    fence = await store.lease().hold()
    assert fence is not None
    return fence


async def test_never_two_on_one_adapter(opened: Callable[[], CanaryStore]) -> None:
    stores = [opened() for _ in range(4)]
    wanted = [new(candidate=number + 2) for number in range(8)]
    begun = await asyncio.gather(
        *(stores[index % 4].begin(one) for index, one in enumerate(wanted)), return_exceptions=True
    )
    records = [one for one in begun if isinstance(one, CanaryRecord)]
    assert len(records) == 1
    assert all(isinstance(one, Conflict | CanaryRecord) for one in begun)
    assert await stores[1].begin(next(one for one in wanted if one.id == records[0].id)) == records[0]
    other = await stores[0].begin(new("other", attached=False))
    assert {one.id for one in await stores[2].running()} == {records[0].id, other.id}
    with pytest.raises(Conflict, match="another canary"):
        await stores[0].begin(new(candidate=99, id=records[0].id))
    await stores[0].decide(records[0], ROLL_BACK)
    assert (await stores[3].begin(new(candidate=3))).state == "running"


async def test_decided_once(opened: Callable[[], CanaryStore]) -> None:
    """Of decisions that come at the same time, one is taken, and repeated ones are taken as the first was."""
    store = opened()
    record = await store.begin(new())
    fence = await fence_of(store)
    answers = await asyncio.gather(
        store.decide(record, PROMOTE, evidence=evidence(), fence=fence),
        store.decide(record, ROLL_BACK),
        return_exceptions=True,
    )
    assert sum(isinstance(one, Conflict) for one in answers) == 1
    now = await store.get(record.id)
    assert now.state in ("promoting", "rolled_back")

    record = await store.begin(new("other", attached=False))
    for _ in range(2):
        promoting = await store.decide(record, PROMOTE, evidence=evidence(7), fence=fence)
    assert (promoting.state, promoting.decision, promoting.ended_at) == ("promoting", PROMOTE, None)
    await store.looked(record.id, evidence(8), fence=fence)
    with pytest.raises(Conflict, match="is being promoted"):
        await store.decide(record, ROLL_BACK)
    for _ in range(2):
        promoted = await store.finish(record, fence=fence)
    assert promoted.state == "promoted"
    assert promoted.evidence == evidence(7), "what a decision rests on stays"
    assert promoted.ended_at is not None
    with pytest.raises(Conflict, match="was promoted"):
        await store.decide(record, ROLL_BACK)
    with pytest.raises(NotFound):
        await store.get("canary_none")


async def test_a_former_controller_writes_nothing(opened: Callable[[], CanaryStore], raw: redis.Redis) -> None:
    store = opened()
    record = await store.begin(new())
    before = await fence_of(store)
    raw.delete("temper:lease:canaries")  # it was asleep for too long
    fence = await fence_of(store)
    for late in (
        store.looked(record.id, evidence(), fence=before),
        store.decide(record, PROMOTE, evidence=evidence(), fence=before),
        store.finish(record, fence=before),
    ):
        with pytest.raises(LeaseLost):
            await late
    assert await store.get(record.id) == record
    await store.looked(record.id, evidence(), fence=fence)
    assert (await store.get(record.id)).evidence == evidence()


async def test_gateways_are_told_of_what_runs_and_of_the_last_look(
    opened: Callable[[], CanaryStore], raw: redis.Redis
) -> None:
    store = opened()
    record = await store.begin(new())
    with pytest.raises(Conflict, match="the base model's name has the canary"):
        await store.begin(new("other", current="base"))
    ((route, age),) = (await store.routes()).items()
    assert (route.id, route.candidate, route.share, route.key) == (record.id, "toy@2", 0.25, record.key)
    assert 0 <= age < 5
    raw.hset(f"{ROOT}{record.id}", "looked", str(await store.now() - 60))
    assert 59 < (await store.routes())[route] < 65
    fence = await fence_of(store)
    await store.looked(record.id, evidence(), fence=fence)
    assert (await store.routes())[route] < 5
    await store.decide(record, PROMOTE, fence=fence)
    assert list(await store.routes()) == [route], "until the pointers have moved"
    await store.finish(record, fence=fence, instead=ROLL_BACK)
    assert await store.routes() == {}
    assert (await store.get(record.id)).state == "superseded"


async def test_listed_newest_first_and_the_oldest_go(opened: Callable[[], CanaryStore], raw: redis.Redis) -> None:
    store = opened()
    made = [await store.begin(new(f"toy-{number}", owner=f"key-{number % 2}", attached=False)) for number in range(5)]
    await store.decide(made[1], ROLL_BACK)
    assert [one.id for one in await store.list(ALL, limit=2)] == [made[4].id, made[3].id]
    assert [one.id for one in await store.list(ALL, limit=9, after=made[3].id)] == [one.id for one in made[2::-1]]
    assert [one.id for one in await store.list(CanaryFilter(state="rolled_back"), limit=9)] == [made[1].id]
    assert [one.id for one in await store.list(CanaryFilter("key-0", "toy-2"), limit=9)] == [made[2].id]
    await store.count(made[1].id, "gateway", "{}")
    raw.zadd(f"{ROOT}all", {f"canary_z{number:025}": 0 for number in range(1000)})  # as if so many had been since
    await store.begin(new("toy-9", attached=False))
    assert raw.exists(f"{ROOT}{made[1].id}", f"{ROOT}{made[1].id}:counts") == 0
    assert all([(await store.get(one.id)).state == "running" for one in (made[0], *made[2:])])
    raw.hset(f"{ROOT}{made[0].id}", "schema", "2")
    with pytest.raises(NewerSchema):
        await store.get(made[0].id)
