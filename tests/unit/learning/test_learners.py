"""Cycles of learners: killed, raced or failing anywhere, each makes one data set, one job and one canary."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from services.common.errors import Conflict, InvalidRequest, NotFound, Unavailable
from services.common.jobs import Job, JobState
from services.common.jobs.record import NOT_PUBLISHED
from services.common.storage.lease import LeaseLost
from services.learning.canaries.record import CanaryRecord, Decision
from services.learning.learners.policy import LearnerPolicy, Window
from services.learning.learners.record import OUTCOMES, Cycle, JobTime, Learner
from services.learning.learners.steps import LONGEST_WAIT, CycleData, failed, next_step
from services.learning.learners.store import NewLearner
from services.learning.learners.trigger import due
from tests.unit.gateway.fake_learning import MemoryLearners

CANARY = {"share": 0.5}
END = st.sampled_from(["promoted", "rolled_back", "superseded", "rejected", "broken", "no rows"])


def policy(**more: Any) -> LearnerPolicy:
    fields = {"name": "l", "adapter": "a", "method": "sft", "trigger": {"min_rows": 1}, "budget": {"jobs": None}}
    return LearnerPolicy.model_validate({**fields, **more})


def learner(cycle: Cycle | None = None, **more: Any) -> Learner:
    begun = cycle or Cycle(entered_at=0.0)
    return Learner(
        id="learner_1", policy=policy(**more), revision=1, turn=1, cycle=begun, created_at=0.0, changed_at=0.0
    )


class Killed(Exception):
    """The process died here."""


class World:
    """What there is outside: it survives the processes, and says how each cycle ends."""

    def __init__(self, ends: Sequence[str]) -> None:
        self.ends = ends
        self.made: Counter[str] = Counter()
        self.jobs: dict[str, Job] = {}
        self.canaries: dict[str, CanaryRecord] = {}
        self.pending: dict[str, str] = {}

    def end(self, learner: Learner) -> str:
        return self.ends[(learner.cycle.number - 1) % len(self.ends)]


class Process:
    """CycleWork of one process over the world; it dies at one of its calls, before or after what that does."""

    def __init__(
        self, world: World, *, dies_at: int = 0, after: bool = False, away: frozenset[int] = frozenset()
    ) -> None:
        self.world, self.calls = world, 0
        self.dies_at, self.after, self.away = dies_at, after, away

    async def _point(self) -> bool:
        """Whether it dies behind this call."""
        await asyncio.sleep(0)
        self.calls += 1
        if self.calls in self.away:
            raise Unavailable("the store is away")
        if self.calls == self.dies_at and not self.after:
            raise Killed
        return self.calls == self.dies_at

    async def known_until(self, learner: Learner, now: float) -> float:
        return now - 1.0

    async def waiting(self, learner: Learner) -> int:
        if await self._point():
            raise Killed
        return 5

    async def make_data(self, learner: Learner) -> CycleData:
        dies = await self._point()
        if self.world.end(learner) == "no rows":
            raise InvalidRequest("no row fulfils all conditions", param="filter")
        self.world.made[f"data {learner.cycle_key}"] = 1
        if dies:
            raise Killed
        return CycleData(f"l@{learner.cycle.number}", {})

    async def submit(self, learner: Learner, dataset: str) -> Job:
        dies, key = await self._point(), learner.cycle_key
        if key not in self.world.jobs:
            end = self.world.end(learner)
            state = JobState.FAILED if end in ("rejected", "broken") else JobState.SUCCEEDED
            reason = {"rejected": f"{NOT_PUBLISHED}no gain", "broken": "an example is too long"}.get(end)
            version = None if reason else f"a@{learner.cycle.number}"
            self.world.made[f"job {dataset}"] += 1
            self.world.jobs[key] = Job(
                id=key, kind="sft", adapter="a", state=state, created_at=1.0, reason=reason, result_adapter=version
            )
        if dies:
            raise Killed
        return self.world.jobs[key]

    async def job(self, job_id: str) -> Job:
        if await self._point():
            raise Killed
        return self.world.jobs[job_id]

    async def cancel(self, job_id: str, reason: str) -> None:
        ended = {"state": JobState.CANCELLED, "reason": reason}
        self.world.jobs[job_id] = self.world.jobs[job_id].model_copy(update=ended)

    async def gates(self, job: Job) -> Sequence[Mapping[str, Any]]:
        return [{"gate": "publish_if"}] if job.reason else []

    async def begin_canary(self, learner: Learner, candidate: str) -> CanaryRecord:
        dies, named = await self._point(), learner.canary_id
        if named not in self.world.canaries:
            self.world.made[f"canary {candidate}"] += 1
            assert learner.policy.canary is not None
            begun = {"id": named, "adapter": "a", "current": "base", "candidate": candidate, "attached": True}
            outcome = {"promoted": "promote", "rolled_back": "roll_back"}.get(self.world.end(learner), "supersede")
            said = Decision.model_validate({"outcome": outcome, "reason": "person", "detail": "so"})
            self.world.canaries[named] = CanaryRecord(
                **begun,
                policy=learner.policy.canary,
                key="",
                state=self.world.end(learner),
                began_at=1.0,
                decision=said,
            )
        if dies:
            raise Killed
        return self.world.canaries[named]

    async def canary(self, canary_id: str) -> CanaryRecord:
        if await self._point():
            raise Killed
        return self.world.canaries[canary_id]


async def live(store: MemoryLearners, work: Process, fence: int, cycles: int, clock: list[float]) -> None:
    """Does steps as a controller does, until so many cycles have ended."""
    for _ in range(60):
        found = await store.get("l")
        if found.cycle.state == "stopped" or (found.cycle.number >= cycles and found.cycle.state == "collecting"):
            return
        clock[0] += LONGEST_WAIT
        try:
            step = await next_step(found, work, clock[0])
            if work.dies_at and work.calls >= work.dies_at:
                raise Killed  # between what it did and what it would have written
            if step is not None:
                await store.write(found, step.cycle, step.events, fence=fence)
        except (Unavailable, Conflict, NotFound) as error:
            if isinstance(error, LeaseLost):
                return


@given(
    ends=st.lists(END, min_size=1, max_size=4),
    deaths=st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=4),
    away=st.frozensets(st.integers(1, 20), max_size=4),
    rivals=st.integers(1, 3),
    tries=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_everything_happens_once_a_cycle(
    ends: list[str], deaths: list[tuple[int, bool]], away: frozenset[int], rivals: int, tries: bool
) -> None:
    asyncio.run(_everything_once(ends, deaths, away, rivals, tries))


async def _everything_once(
    ends: list[str], deaths: list[tuple[int, bool]], away: frozenset[int], rivals: int, tries: bool
) -> None:
    store, world, clock = MemoryLearners(), World(ends), [0.0]
    await store.create(NewLearner(policy(stop_after=3, **({"canary": CANARY} if tries else {}))), Cycle(entered_at=0.0))
    for dies_at, after in deaths:
        fence = await store.lease().hold()
        assert fence is not None
        try:
            await live(store, Process(world, dies_at=dies_at, after=after, away=away), fence, 6, clock)
        except Killed:
            continue
    leases = [await store.lease().hold() or 0 for _ in range(rivals)]  # all but the last are of the past
    await asyncio.gather(*(live(store, Process(world, away=away), fence, 6, clock) for fence in leases))
    found = await store.get("l")
    told = list(reversed(await store.events(found, limit=1000)))
    assert all(count == 1 for count in world.made.values()), world.made
    for number in range(1, found.cycle.number + 1):
        of_cycle = [event.kind for event in told if event.cycle == number and event.kind != "stopped"]
        end = ends[(number - 1) % len(ends)]
        tried = tries and end not in ("rejected", "broken", "no rows")
        outcome = {"broken": "failed", "no rows": "failed"}.get(end, end if tried or end == "rejected" else "promoted")
        assert [kind for kind in of_cycle if kind in OUTCOMES] == [outcome]
        expected = (
            ["preparing"] + (["data", "training"] if end != "no rows" else []) + (["canary"] * 2 if tried else [])
        )
        assert of_cycle == [*expected, outcome]
    refused = [event.kind for event in told if event.kind in OUTCOMES and event.kind not in ("failed", "superseded")]
    runs = "".join("x" if kind in ("rejected", "rolled_back") else "." for kind in refused)
    assert (found.cycle.state == "stopped") == ("xxx" in runs), told
    assert "xxx" not in runs[:-1], "it stops at the third"
    promoted = [event.cycle for event in told if event.kind == "promoted"]
    taught = [event.evidence["dataset"] for event in told if event.kind == "data" and event.cycle in promoted]
    assert list(found.cycle.datasets) == taught, "only what taught a promoted version is replayed"


def test_a_cycle_begins_when_all_says_so() -> None:
    def why(waiting: int, now: float, cycle: Cycle | None = None, **more: Any) -> tuple[bool, str]:
        found = due(learner(cycle, **more), waiting, now)
        return found.now, found.why

    both = {"trigger": {"min_rows": 10, "every_seconds": 60, "window": {"begin": "22:00", "end": "02:00"}}}
    assert why(10, 23 * 3600, **both)[0]
    assert why(9, 23 * 3600, **both) == (False, "9 of 10 new rows are there")
    assert why(10, 3 * 3600, **both)[1] == "cycles begin between 22:00 and 02:00 UTC"
    recent = Cycle(entered_at=0, began_at=23 * 3600 - 59)
    assert why(10, 23 * 3600, recent, **both) == (False, "59 of 60 s have passed")
    assert why(0, 3 * 3600, recent.model_copy(update={"asked": True}), **both)[0], "somebody asked for it"
    spent = Cycle(entered_at=0, jobs=(JobTime(began_at=10.0, seconds=50.0), JobTime(began_at=20.0)), asked=True)
    assert "budget of 2 jobs" in why(10, 100.0, spent, budget={"jobs": 2})[1]
    assert "50 s of training" in why(10, 100.0, spent, budget={"training_seconds": 50})[1]
    learnt = Cycle(entered_at=0, jobs=(JobTime(began_at=10.0, tokens=700), JobTime(began_at=20.0, tokens=301)))
    assert why(10, 100.0, learnt, budget={"training_tokens": 1001}) == (
        False,
        "its budget of 1001 trained tokens in 24 hours is used up: 1001 are trained on",
    )
    assert why(10, 100.0, learnt, budget={"training_tokens": 1002})[0]
    assert why(10, 86_415.0, learnt, budget={"training_tokens": 1001})[0], "a day later the first does not count"
    assert why(10, 86_415.0, spent, budget={"jobs": 2})[0], "a day later the first does not count"
    assert why(9, 1e9, Cycle(entered_at=0, paused=True))[1] == "it is paused"
    assert not Window(begin="08:00", end="09:00").holds(9 * 3600)
    assert Window(begin="08:00", end="09:00").holds(8 * 3600)


@pytest.mark.parametrize(
    ("budget", "most", "said"),
    [
        ({"cycle_tokens": 100}, 100, "over the budget of 100 in a cycle"),
        ({"training_tokens": 1000}, 300, "1001 in 24 hours, over the budget of 1000"),
        ({"training_tokens": 1000, "cycle_tokens": 1000}, 300, "1001 in 24 hours"),
    ],
)
def test_a_job_beyond_the_budget_of_tokens_is_cancelled(budget: dict[str, int], most: int, said: str) -> None:
    """With the number that it has reported, which the budget of the day goes on with."""
    earlier = (JobTime(began_at=-90_000.0, tokens=10**6), JobTime(began_at=10.0, tokens=700))
    preparing = Cycle(entered_at=0, state="preparing", number=1, dataset="l@1", jobs=earlier)
    found, world = learner(preparing, budget=budget), World(["promoted"])
    work = Process(world)

    def step() -> Cycle | None:
        taken = asyncio.run(next_step(found, work, 100.0))
        return None if taken is None else taken.cycle

    cycle = step()
    assert cycle is not None
    assert [one.tokens for one in cycle.jobs] == [700, 0], "what is over a day old counts no more"
    found = found.model_copy(update={"cycle": cycle})
    (key,) = world.jobs
    for tokens in (0, most, most + 1):
        running = {"state": JobState.RUNNING, "metrics": {"num_tokens": float(tokens)}}
        world.jobs[key] = world.jobs[key].model_copy(update=running)
        assert step() is None
        assert (world.jobs[key].state is JobState.CANCELLED) == (tokens > most)
    taken = asyncio.run(next_step(found, work, 100.0))
    assert taken is not None
    assert said in taken.events[0].detail
    assert f"{most + 1} tokens are trained on" in taken.events[0].detail
    assert (taken.cycle.outcome, [one.tokens for one in taken.cycle.jobs]) == ("failed", [700, most + 1])


def test_a_failed_cycle_waits_longer_each_time() -> None:
    found = learner(Cycle(entered_at=0, state="training", number=1, until=5.0))
    waits = []
    for _ in range(9):
        step = failed(found, 100.0, "why", {})
        waits.append(step.cycle.not_before - 100.0)
        found = found.model_copy(update={"cycle": step.cycle})
    assert waits[:3] == [30.0, 60.0, 120.0]
    assert waits[-1] == LONGEST_WAIT
    assert found.cycle.until == 5.0, "its rows come again"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"method": "opd"}, "method"),
    ({"settings": {"learning_rat": 1}}, "no settings of a learner's job of kind sft: unknown field 'learning_rat'"),
    ({"settings": {"adapter": "b"}}, "said elsewhere"),
    ({"settings": {"examples": [{"text": "x"}]}}, "leave one of them out"),
    ({"gate": {"metric": "eval_accuracy"}}, "no gate of a learner's job of kind sft"),
    ({"trigger": {"min_rows": None}}, "nothing would begin a cycle"),
    ({"trigger": {"window": {"begin": "24:00", "end": "01:00"}}}, "window.begin"),
    ({"replay": {"share": 0.6}, "anchor": {"dataset": "d", "share": 0.4}}, "leave nothing for new rows"),
    ({"data": {"filter": {"said_since": 1}}}, "for the learner to say"),
    ({"settings": {"lora": {"alpha": float("nan")}}}, ""),
    ({"canary": {"share": 0.9}}, "canary.share"),
    ({"more": 1}, "more"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG)
def test_a_policy_is_strict(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        policy(**fields)
    assert said in str(refused.value)


def test_the_parts_of_a_cycle() -> None:
    found = policy(
        settings={"epochs": 2, "lora": {"rank": 4}},
        gate={"gain": [{"suite": "s"}]},
        canary=CANARY,
        replay={"share": 0.3, "datasets": 2},
        anchor={"dataset": "chat", "share": 0.1},
        data={"filter": {"min_rating": -1}, "max_user_share": 0.2},
    )
    job = found.job("l@3")
    assert (job["attach"], job["candidate"], job["publish_if"]["gain"]) == (False, True, [{"suite": "s"}])
    assert (job["dataset"], job["epochs"], job["lora"]) == ("l@3", 2, {"rank": 4})
    assert "candidate" not in policy().job("l@3"), "without a canary it is promoted by its job"
    spec = found.spec(5.0, 9.0, ("l@1", "l@2", "l@3"))
    assert (spec.filter.said_since, spec.filter.said_until, spec.filter.min_rating) == (5.0, 9.0, -1)
    assert [(one.datasets, one.share) for one in spec.mix] == [(["l@2", "l@3"], 0.3), (["chat"], 0.1)]
    assert policy(replay={"share": 0.3}).spec(0, 1, ()).mix == [], "there is nothing to replay yet"


def test_what_the_gate_asks_is_not_taught() -> None:
    gate: dict[str, Any] = {"gain": [{"suite": "sums"}], "no_loss": [{"suite": "dates@2", "max_loss": 0.1}]}
    data = {"apart_from": ["own", "sums"]}
    assert policy(gate=gate, data=data).spec(0, 1, ()).apart_from == ["own", "sums", "dates@2"]
    assert policy(gate={**gate, "allow_contaminated": True}, data=data).spec(0, 1, ()).apart_from == ["own", "sums"]
    many = {"apart_from": [f"suite-{number}" for number in range(31)]}
    with pytest.raises(ValidationError, match="more than 32 suites"):
        policy(gate=gate, data=many)
