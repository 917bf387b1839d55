"""A scheduler with a toy model behind it, for tests that go case by case."""

from __future__ import annotations

from services.engine.requests.adapter import AdapterPin
from services.engine.requests.outputs import SequenceUpdate
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.draft_depth import StepCosts
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.step_plan import StepPlan
from tests.unit.engine.machine import ToyRunner, request

ADAPTER = AdapterPin("a@1", "digest", 1)
LONG = tuple(range(1, 20))
"""19 tokens: four full blocks of 4 and a tail of 3."""


class Engine:
    """A scheduler with a toy model behind it."""

    def __init__(
        self, depth: int = 1, costs: StepCosts | None = None, **changes: int | bool | frozenset[int] | None
    ) -> None:
        defaults: dict[str, int | bool | frozenset[int] | None] = {
            "max_num_seqs": 4,
            "token_budget": 32,
            "block_size": 4,
            "num_blocks": 64,
            "num_slots": 12,
            "max_model_len": 128,
            "snapshot_interval": 1000,
        }
        self.config = SchedulerConfig(**{**defaults, **changes})
        self.scheduler = Scheduler(self.config, depth, costs=costs)
        self.runner = ToyRunner(self.config, depth, costs)
        self.updates: dict[str, list[SequenceUpdate]] = {}

    def add(self, name: str, prompt: tuple[int, ...], **changes: object) -> None:
        self.scheduler.add(request(name, prompt, **changes))

    def step(self, now: float = 0.0) -> StepPlan:
        plan = self.scheduler.schedule(now)
        assert plan is not None
        self.take(self.scheduler.take_expired())
        self.take(self.scheduler.update(plan, self.runner.execute(plan), now))
        self.scheduler.check_integrity()
        return plan

    def take(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            self.updates.setdefault(update.request_id, []).append(update)

    def run(self) -> list[StepPlan]:
        plans = []
        while self.scheduler.has_work:
            plans.append(self.step())
        return plans

    def output(self, name: str) -> list[int]:
        return [update.token.token_id for update in self.updates[name] if update.token is not None]

    def cached(self, name: str) -> int | None:
        return self.updates[name][0].cached_tokens


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(chunk.request.request_id, chunk.start, len(chunk.token_ids), chunk.samples) for chunk in plan.chunks]
