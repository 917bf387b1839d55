"""Overlapping steps: what is launched and collected when, and what becomes of it if something fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest

from services.common.errors import TemperError
from services.engine.kv_offload.messages import Save
from services.engine.loop.step_pipeline import StepPipeline
from services.engine.observability.events import EngineEvent, EventStream, StepDone
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.request import FinishReason
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.draft_depth import StepCosts
from services.engine.scheduler.step_plan import PENDING, StepPlan, StepResult
from tests.unit.engine.machine import ToyRunner, reference, request
from tests.unit.engine.toy_tiers import ToyTiers

CONFIG = SchedulerConfig(max_num_seqs=4, token_budget=32, block_size=4, num_blocks=64, num_slots=12, max_model_len=64)
PROMPT = (1, 2, 3)


class Bench(ToyRunner):
    """Runner, gate, observer and clock in one, with a log of what happened in which order."""

    def __init__(
        self,
        depth: int = 2,
        *,
        tiers: bool = False,
        config: SchedulerConfig = CONFIG,
        costs: StepCosts | None = None,
    ) -> None:
        super().__init__(config, depth, costs)
        self.tiers = ToyTiers(self, CONFIG.block_size) if tiers else None
        self.during_step: Callable[[], None] = lambda: None
        self.log: list[str] = []
        self.contended = False
        self.held = False
        self.now = 0.0
        self.launches = 0
        self.failing_launches: set[int] = set()
        self.failing_results: set[int] = set()
        self.stats: list[StepDone] = []
        self.plans: list[StepPlan] = []
        self.updates: dict[str, list[SequenceUpdate]] = {}
        self.pipeline = StepPipeline(config, self, self, EventStream(self.listen), lambda: self.now, self.tiers)

    def launch(self, plan: StepPlan) -> Step:
        number = self.launches
        self.launches += 1
        assert self.held
        self.log.append(f"launch {number}")
        self.plans.append(plan)
        if number in self.failing_launches:
            raise RuntimeError("device lost")
        return Step(self, number, self.execute(plan))

    def acquire(self) -> None:
        assert not self.held
        self.held = True
        self.log.append("acquire")

    def release(self, step_seconds: float) -> None:
        assert self.held
        self.held = False
        self.log.append(f"release {step_seconds:g}")

    def launching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def engine_idle(self) -> None:
        raise AssertionError("the loop's business")

    def listen(self, event: EngineEvent) -> None:
        if isinstance(event, StepDone):
            self.stats.append(event)

    def add(self, name: str, max_tokens: int, prompt: tuple[int, ...] = PROMPT) -> None:
        self.pipeline.scheduler.add(request(name, prompt, max_tokens=max_tokens))

    def advance(self) -> list[str]:
        """Runs one iteration; returns its log."""
        before = len(self.log)
        for update in self.pipeline.advance(0):
            self.updates.setdefault(update.request_id, []).append(update)
        self.pipeline.scheduler.check_integrity()
        return self.log[before:]

    def output(self, name: str) -> list[int]:
        return [update.token.token_id for update in self.updates.get(name, []) if update.token is not None]


class Step:
    """A launched step that takes a second."""

    def __init__(self, bench: Bench, number: int, value: StepResult) -> None:
        self.bench = bench
        self.number = number
        self.value = value

    def result(self) -> StepResult:
        self.bench.now += 1.0
        self.bench.during_step()
        self.bench.log.append(f"result {self.number}")
        if self.number in self.bench.failing_results:
            raise RuntimeError("device lost")
        return self.value


def test_a_step_is_launched_before_the_one_before_is_collected() -> None:
    bench = Bench()
    bench.add("r", 4)
    assert bench.advance() == ["acquire", "launch 0"]
    assert bench.advance() == ["launch 1", "result 0"]
    assert bench.output("r") == reference(PROMPT, 1), "published while step 1 runs"
    assert bench.advance() == ["launch 2", "result 1"]
    assert bench.advance() == ["launch 3", "result 2"]
    # Four tokens are planned: nothing is launched that could only be thrown away.
    assert bench.advance() == ["result 3", "release 1"]
    assert not bench.pipeline.busy
    assert bench.output("r") == reference(PROMPT, 4)
    assert [list(plan.chunks[0].token_ids) for plan in bench.plans] == [[1, 2, 3], [PENDING], [PENDING], [PENDING]]
    assert [plan.chunks[0].output_count for plan in bench.plans] == [0, 1, 2, 3]
    assert [stats.compute_seconds for stats in bench.stats] == [1.0] * 4
    assert bench.pipeline.steps == 4


def test_without_overlap_steps_alternate() -> None:
    bench = Bench(depth=1)
    bench.add("r", 2)
    assert bench.advance() == ["acquire", "launch 0", "result 0", "release 1"]
    assert bench.advance() == ["acquire", "launch 1", "result 1", "release 1"]
    assert bench.output("r") == reference(PROMPT, 2)
    assert list(bench.plans[1].chunks[0].token_ids) == reference(PROMPT, 1)


def test_a_trainer_ends_the_overlap_for_as_long_as_it_is_there() -> None:
    bench = Bench()
    bench.add("r", 7)
    bench.advance()
    bench.advance()
    bench.contended = True
    assert bench.advance() == ["result 1", "release 1"], "the device is idle for the trainer"
    assert bench.advance() == ["acquire", "launch 2", "result 2", "release 1"]
    assert bench.advance() == ["acquire", "launch 3", "result 3", "release 1"]
    bench.contended = False
    assert bench.advance() == ["acquire", "launch 4"]
    assert bench.advance() == ["launch 5", "result 4"]
    while bench.pipeline.busy:
        bench.advance()
    assert bench.output("r") == reference(PROMPT, 7)


def test_what_ends_meanwhile_is_computed_once_too_often_and_dropped() -> None:
    stop = reference(PROMPT, 3)[2]
    bench = Bench()
    bench.pipeline.scheduler.add(request("r", PROMPT, max_tokens=9, stop_token_ids=frozenset({stop})))
    while bench.pipeline.busy:
        bench.advance()
    assert bench.output("r") == reference(PROMPT, 3)
    assert bench.updates["r"][-1].finish_reason is FinishReason.STOP
    assert bench.launches == 4


def test_an_abort_drops_what_is_in_flight() -> None:
    bench = Bench()
    bench.add("r", 9)
    bench.add("other", 3)
    bench.advance()
    bench.advance()
    assert bench.pipeline.scheduler.abort("r") is not None
    while bench.pipeline.busy:
        bench.advance()
    assert len(bench.updates["r"]) == 1
    assert bench.output("other") == reference(PROMPT, 3)
    assert not bench.held


def test_nothing_is_planned_on_top_of_a_launch_that_failed() -> None:
    bench = Bench()
    bench.add("r", 9)
    bench.failing_launches = {2}
    bench.advance()
    bench.advance()
    assert bench.advance() == ["launch 2", "result 1", "release 0"]
    assert bench.output("r") == reference(PROMPT, 2), "what was launched before is not lost"
    last = bench.updates["r"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.finished is not None
    assert list(last.finished.output_ids) == reference(PROMPT, 2)
    assert (bench.pipeline.failed_steps, bench.pipeline.failures_in_a_row) == (1, 1)
    bench.add("next", 2)
    while bench.pipeline.busy:
        bench.advance()
    assert bench.output("next") == reference(PROMPT, 2)
    assert bench.pipeline.failures_in_a_row == 0


def test_a_failed_step_ends_its_requests_and_not_those_that_came_after() -> None:
    bench = Bench()
    bench.add("unlucky", 9)
    bench.failing_results = {0}
    bench.advance()
    bench.add("lucky", 3)
    assert bench.advance() == ["launch 1", "result 0"]
    assert bench.updates["unlucky"][-1].error is not None
    while bench.pipeline.busy:
        bench.advance()
    assert bench.output("lucky") == reference(PROMPT, 3)
    assert not bench.held


@pytest.mark.parametrize(("row", "pays"), [(0.02, True), (2.0, False)])
def test_draft_tokens_by_the_runners_costs(row: float, pays: bool) -> None:
    """Also for the scheduler after a reset. Rows that are checked count as decodes, and outputs are the same."""
    costs = StepCosts({(1, drafts): 1 + (row + 0.01) * drafts for drafts in range(5)})
    bench = Bench(config=replace(CONFIG, draft_tokens=4), costs=costs)
    for name in ("r", "again"):
        bench.add(name, 30)
        del bench.plans[:], bench.stats[:]
        while bench.pipeline.busy:
            bench.advance()
        assert bench.output(name) == reference(PROMPT, 30)
        assert any(plan.verifies for plan in bench.plans) is pays
        assert max(stats.decodes for stats in bench.stats) == (5 if pays else 1)
        assert [stats.prefill_tokens for stats in bench.stats] == [3, *[0] * (len(bench.stats) - 1)]
        bench.pipeline.reset(ValueError("a bug"), TemperError("sorry"))


def test_reset_waits_for_what_is_in_flight_and_starts_with_clean_books() -> None:
    bench = Bench()
    bench.add("r", 9)
    bench.advance()
    bench.advance()
    bench.failing_results = {1}
    (update,) = bench.pipeline.reset(ValueError("a bug"), TemperError("sorry"))
    assert update.finish_reason is FinishReason.ERROR
    assert bench.log[-2:] == ["result 1", "release 0"]
    assert not bench.pipeline.busy
    assert bench.pipeline.scheduler.counts().slots_used == 0
    bench.add("next", 2)
    while bench.pipeline.busy:
        bench.advance()
    assert bench.output("next") == reference(PROMPT, 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_result_of_the_wrong_size_fails_the_step(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(depth)
    bench.add("r", 2)
    monkeypatch.setattr(bench, "execute", lambda plan: StepResult(()))
    while bench.pipeline.busy:
        bench.advance()
    assert bench.updates["r"][-1].error is not None
    assert not bench.held


def test_nothing_is_saved_behind_what_a_tier_gave_up_while_the_step_ran() -> None:
    bench = Bench(depth=1, tiers=True)
    tiers, prompt = bench.tiers, tuple(range(1, 20))
    assert tiers is not None

    def run() -> None:
        while bench.pipeline.busy:
            bench.advance()

    def lose() -> None:
        for key in list(tiers.entries):
            tiers.drop(key)

    bench.add("turn 1", 2, prompt)
    run()
    tiers.work()
    assert tiers.entries
    bench.add("turn 2", 1, (*prompt, *reference(prompt, 2), *range(30, 40)))
    bench.during_step = lose
    run()
    saves = [job for job in tiers.commands if isinstance(job, Save)]
    assert [save.entry.start for save in saves] == [0], "the first one behind what is left, which is nothing"
