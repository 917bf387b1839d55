"""Controllers of canaries on a real Valkey: killed and put to sleep between any two steps, one promotes once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis

from services.common.adapters.keys import canary_key, manifest_key
from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import CONFIG, WEIGHTS, AdapterRegistry
from services.common.errors import Conflict, Unavailable
from services.common.settings import CommonSettings
from services.learning.canaries.answers import Counts, counts_json
from services.learning.canaries.beginning import begin_canary
from services.learning.canaries.controller import CanaryController, Stores
from services.learning.canaries.enrolment import Enrolment, answer_digits, arm_of_session, session_mark
from services.learning.canaries.policy import CanaryPolicy
from services.learning.canaries.record import Arm, CanaryRecord, Decision
from services.learning.canaries.store import CanaryStore, Route
from services.learning.feedback.record import Feedback
from services.learning.feedback.store import FeedbackFilter, FeedbackStore
from tests.integration.servers import RunningServer
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL
from tests.unit.gateway.fake_stores import MemoryStore

ONE, TWO, THREE = (AdapterVersion("toy", number) for number in (1, 2, 3))
POLICY = CanaryPolicy(share=0.5, gain=0.5)
PROMOTE = Decision(outcome="promote", reason="person", detail="yes", by="key-1")


class Killed(BaseException):
    """The process is gone."""


@dataclass
class Steps:
    """Counts the calls of stores, and does something in front of or behind one of them."""

    at: int = -1
    behind: bool = False
    act: Callable[[], Awaitable[None]] | None = None
    taken: list[str] = field(default_factory=list)

    def around(self, target: Any) -> Any:
        return _Watched(target, self)

    async def step(self, name: str, call: Callable[[], Any]) -> Any:
        number = len(self.taken)
        self.taken.append(name)
        if number == self.at and not self.behind:
            await self._happens()
        result = call()
        if asyncio.iscoroutine(result):
            result = await result
        if number == self.at and self.behind:
            await self._happens()
        return result

    async def _happens(self) -> None:
        if self.act is None:
            raise Killed
        await self.act()


class _Watched:
    """A store whose calls are steps; the registry's run in threads, and hop back for it."""

    def __init__(self, target: Any, steps: Steps) -> None:
        self._target, self._steps = target, steps
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name in ("lease", "each"):
            return lambda *args: _Watched(found(*args), self._steps) if name == "lease" else found(*args)
        if not callable(found):
            return found
        if isinstance(self._target, AdapterRegistry):

            def blocking(*args: Any, **named: Any) -> Any:
                step = self._steps.step(name, lambda: found(*args, **named))
                return asyncio.run_coroutine_threadsafe(step, self._loop).result()

            return blocking
        return lambda *args, **named: self._steps.step(name, lambda: found(*args, **named))


@dataclass
class World:
    """Stores with an adapter whose first version is current and attached, and a candidate."""

    canaries: CanaryStore
    feedback: FeedbackStore
    registry: AdapterRegistry
    raw: redis.Redis
    ended: list[CanaryRecord] = field(default_factory=list)
    syncs: int = 0

    async def begin(self, candidate: AdapterVersion = TWO, policy: CanaryPolicy = POLICY) -> CanaryRecord:
        return await begin_canary(self.canaries, self.registry, candidate, policy)

    async def synced(self) -> None:
        self.syncs += 1

    def controller(self, steps: Steps | None = None) -> CanaryController:
        around = (lambda target: target) if steps is None else steps.around
        stores = Stores(around(self.canaries), self.feedback, around(self.registry))
        return CanaryController(stores, self.synced, self.ended.append, lease_seconds=60)

    def forget_lease(self) -> None:
        """As if its holder had been silent for too long."""
        self.raw.delete("temper:lease:canaries")

    def answer(self, record: CanaryRecord, arm: Arm) -> str:
        """Id of an answer of an arm."""
        route = Route(
            id=record.id,
            adapter=record.adapter,
            current=record.current,
            candidate=record.candidate,
            share=record.policy.share,
            attached=record.attached,
            key=record.key,
        )
        return f"chatcmpl-{answer_digits(Enrolment(route, arm))}"

    async def say(self, record: CanaryRecord, arm: Arm, count: int, score: float, **fields: Any) -> None:
        """Users, each with an opinion of one answer."""
        said = [
            {"completion_id": self.answer(record, arm), "score": score, "user": f"{arm}-{number}", **fields}
            for number in range(count)
        ]
        await asyncio.gather(*(self.feedback.add("key-1", Feedback.model_validate(one)) for one in said))

    async def is_better(self, record: CanaryRecord) -> None:
        await self.say(record, "current", 32, -0.5)
        await self.say(record, "candidate", 32, 0.5)

    async def counted(self, record: CanaryRecord, **arms: Counts) -> None:
        await self.canaries.count(record.id, "gateway", counts_json(dict(arms)))

    def pointers(self) -> tuple[AdapterVersion, AdapterVersion | None]:
        return self.registry.current("toy"), self.registry.attached()


@pytest.fixture
async def world(valkey: RunningServer, settings: CommonSettings, raw: redis.Redis) -> AsyncIterator[World]:
    registry = AdapterRegistry(MemoryStore(), MODEL)  # type: ignore[arg-type]
    for current in (True, False, False):
        registry.publish("toy", {WEIGHTS: b"w", CONFIG: b"{}"}, base_digest="", current=current)
    registry.attach(ONE)
    feedback = FeedbackStore(settings, max_bytes=2**24, keep_seconds=3600.0)
    world = World(CanaryStore(settings), feedback, registry, raw)
    yield world
    await world.canaries.aclose()
    await feedback.aclose()


async def test_the_lease_is_held_behind_an_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that gives no thread once does not end the work of the process that has them all to look at."""
    stores = Stores(world.canaries, world.feedback, world.registry)
    controller = CanaryController(stores, world.synced, world.ended.append, look_seconds=3600.0, lease_seconds=3.0)
    hold, refusals = controller._lease.hold, 2  # that of the one look, and the first renewal
    held = asyncio.Event()

    async def refused() -> int | None:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise RuntimeError("can't start new thread")
        fence = await hold()
        held.set()
        return fence

    monkeypatch.setattr(controller._lease, "hold", refused)
    controller.start()
    try:
        await asyncio.wait_for(held.wait(), PATIENCE)
        assert world.raw.exists("temper:lease:canaries")
    finally:
        await controller.stop()


async def test_the_test_decides(world: World) -> None:
    record = await world.begin()
    controller = world.controller()
    await world.say(record, "current", 20, -0.5)
    await world.say(record, "candidate", 20, 0.5)
    assert await controller.look()
    open_one = await world.canaries.get(record.id)
    assert (open_one.state, world.pointers()) == ("running", (ONE, ONE))
    assert open_one.evidence is not None
    assert open_one.evidence.candidate.voices == 20
    await world.is_better(record)
    assert await world.controller().look() is False, "one of them looks"
    controller._read_again = 0.0
    await controller.look()
    ended = await world.canaries.get(record.id)
    assert (ended.state, world.pointers(), world.syncs) == ("promoted", (TWO, TWO), 1)
    assert ended.evidence is not None
    assert ended.evidence.look.verdict == "better"
    assert ended.decision is not None
    assert (ended.decision.reason, ended.decision.by) == ("better", "controller")
    kept = world.registry.store.get(canary_key(TWO, record.id)).data
    assert b'"verdict":"better"' in kept
    assert record.key.encode() not in kept
    assert [one.state for one in world.ended] == ["promoted"]
    assert world.registry.moves("toy")[-1]["by"] == record.id


async def steps_of_a_promotion(world: World) -> int:
    steps = Steps()
    await world.is_better(await world.begin())
    await world.controller(steps).look()
    assert world.pointers() == (TWO, TWO)
    return len(steps.taken)


async def start_over(world: World) -> CanaryRecord:
    """A world in which a better candidate awaits its promotion."""
    world.raw.flushall()
    store = MemoryStore()
    world.registry = AdapterRegistry(store, MODEL)  # type: ignore[arg-type]
    for current in (True, False, False):
        world.registry.publish("toy", {WEIGHTS: b"w", CONFIG: b"{}"}, base_digest="", current=current)
    world.registry.attach(ONE)
    record = await world.begin()
    await world.is_better(record)
    return record


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
async def test_a_promotion_goes_on_where_a_killed_controller_was(world: World, behind: bool) -> None:
    for at in range(await steps_of_a_promotion(world)):
        record = await start_over(world)
        steps = Steps(at, behind)
        with pytest.raises((Killed, BaseExceptionGroup)):
            await world.controller(steps).look()
        died = await world.canaries.get(record.id)
        if world.pointers()[0] == TWO or died.state != "running":
            assert died.evidence is not None, "no pointer moves without evidence"
            assert died.decision is not None
        world.forget_lease()
        following = world.controller()
        await following.look()
        ended = await world.canaries.get(record.id)
        assert (ended.state, world.pointers()) == ("promoted", (TWO, TWO)), steps.taken
        assert [move["by"] for move in world.registry.moves("toy")] == [record.id], steps.taken
        assert world.registry.store.get(canary_key(TWO, record.id)).data
        assert await world.canaries.running() == []


async def test_a_controller_that_wakes_up_undoes_nothing(world: World) -> None:
    """While it slept another one promoted, and a person rolled that back."""
    for at in range(await steps_of_a_promotion(world)):
        record = await start_over(world)

        async def meanwhile(record: CanaryRecord = record) -> None:
            world.forget_lease()
            await world.controller().look()
            assert world.pointers() == (TWO, TWO)
            world.registry.rollback("toy")
            world.registry.attach(ONE)

        steps = Steps(at, behind=True, act=meanwhile)
        await world.controller(steps).look()
        assert world.pointers() == (ONE, ONE), steps.taken
        assert (await world.canaries.get(record.id)).state == "promoted"


async def test_a_person_decides_at_any_point(world: World) -> None:
    record = await world.begin()
    await world.canaries.decide(record, PROMOTE)
    await world.controller().look()
    assert world.pointers() == (TWO, TWO)
    ended = await world.canaries.get(record.id)
    assert (ended.state, ended.decision) == ("promoted", PROMOTE)


async def test_a_guardrail_rolls_back_at_once(world: World) -> None:
    record = await world.begin()
    await world.counted(record, current=Counts(200), candidate=Counts(20, errors=19))
    await world.controller().look()
    ended = await world.canaries.get(record.id)
    assert ended.state == "rolled_back"
    assert ended.decision is not None
    assert ended.decision.reason == "guardrail"
    assert ended.decision.detail.startswith("crossed: errors +0.95")
    assert world.pointers() == (ONE, ONE)


async def test_what_somebody_else_moves_supersedes_it(world: World) -> None:
    moved = await world.begin()
    world.registry.set_current(THREE)
    await world.controller().look()
    assert (await world.canaries.get(moved.id)).state == "superseded"

    world.registry.set_current(ONE)
    detached = await world.begin()
    world.registry.detach("toy")
    world.forget_lease()
    await world.controller().look()
    assert (await world.canaries.get(detached.id)).state == "superseded"

    gone = await world.begin()
    world.registry.store.delete(manifest_key(TWO))
    world.forget_lease()
    await world.controller().look()
    ended = await world.canaries.get(gone.id)
    assert ended.decision is not None
    assert (ended.state, ended.decision.reason) == ("superseded", "gone")

    late = await world.begin(THREE)
    await world.canaries.decide(late, PROMOTE)
    world.registry.publish("toy", {WEIGHTS: b"w", CONFIG: b"{}"}, base_digest="")
    world.forget_lease()
    await world.controller().look()
    ended = await world.canaries.get(late.id)
    assert ended.decision is not None
    assert (ended.state, ended.decision.reason) == ("superseded", "moved")
    assert world.registry.current("toy").version == 4


async def test_time_is_up(world: World) -> None:
    record = await world.begin(policy=CanaryPolicy(max_seconds=0.01))
    await asyncio.sleep(0.02)
    await world.controller().look()
    ended = await world.canaries.get(record.id)
    assert ended.decision is not None
    assert (ended.state, ended.decision.reason) == ("rolled_back", "time")


async def test_the_first_version_is_compared_with_the_base_model(world: World) -> None:
    first = AdapterVersion("new", 1)
    world.registry.publish("new", {WEIGHTS: b"w", CONFIG: b"{}"}, base_digest="", current=False)
    with pytest.raises(Conflict, match="no request would take part"):
        await world.begin(first)
    world.registry.detach("toy")
    record = await world.begin(first)
    assert (record.current, record.attached) == ("base", True)
    await world.is_better(record)
    await world.controller().look()
    assert (world.registry.current("new"), world.registry.attached()) == (first, first)


async def test_feedback_counts_as_it_stands_and_a_user_once(world: World) -> None:
    record = await world.begin(policy=CanaryPolicy(share=0.5, sources=["user", "judge"]))
    controller = world.controller()
    await world.say(record, "candidate", 9, 1.0, user="loud")
    await world.say(record, "candidate", 1, -1.0, user="ann", label="rude")
    await world.say(record, "current", 1, 0.5, user="ann", source="judge")
    await world.say(record, "current", 1, 0.5, user="bot", source="test")
    better = {"completion_id": world.answer(record, "candidate"), "preferred_over": world.answer(record, "current")}
    await world.feedback.add("key-1", Feedback.model_validate({**better, "user": "bob"}))
    session = {"session_id": "s-1", "score": 0.0}
    await world.feedback.add("key-1", Feedback.model_validate({**session, "user": "eve"}))
    await world.canaries.answered(record.id, [session_mark("key-1", "s-1")])
    for stranger in ({"session_id": "s-2"}, {"session_id": "s-3", "user": "eve"}):  # no version answered there
        await world.feedback.add("key-1", Feedback.model_validate({**session, **stranger}))
    stray = {"completion_id": f"chatcmpl-{'0' * 32}", "thumb": "up"}
    await world.feedback.add("key-1", Feedback.model_validate(stray))
    await controller.look()
    evidence = (await world.canaries.get(record.id)).evidence
    assert evidence is not None
    on_session = arm_of_session(record.key, 0.5, "key-1", "s-1")
    voices = {"candidate": 3, "current": 2}  # loud, ann and bob; ann's judge and bob
    voices[on_session] += 1
    assert {"candidate": evidence.candidate.voices, "current": evidence.current.voices} == voices
    total = (1.0 - 1.0 + 1.0) / voices["candidate"]
    assert evidence.candidate.score == pytest.approx(total)
    assert evidence.candidate.labels == {"rude": 1}
    async for opinion in world.feedback.each(FeedbackFilter(None, user="loud")):
        await world.feedback.delete([opinion.id])
    controller._read_again = 0.0
    await controller.look()
    evidence = (await world.canaries.get(record.id)).evidence
    assert evidence is not None
    assert evidence.candidate.voices == voices["candidate"] - 1


async def test_without_the_object_store_guardrails_hold(world: World) -> None:
    record = await world.begin()
    await world.is_better(record)

    def away(*_: object) -> None:
        raise Unavailable("away")

    manifest, world.registry.manifest = world.registry.manifest, away  # type: ignore[method-assign, assignment]
    controller = world.controller()
    await controller.look()
    looked = await world.canaries.get(record.id)
    assert looked.state == "running", "nothing is promoted that cannot be"
    assert looked.evidence is not None
    world.registry.manifest = manifest  # type: ignore[method-assign]
    await controller.look()
    assert (await world.canaries.get(record.id)).state == "promoted"
