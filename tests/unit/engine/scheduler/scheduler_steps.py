"""Engines and clients that the tests of scheduler share."""

from __future__ import annotations

from services.engine.scheduler.step_plan import StepPlan, StepResult
from tests.unit.engine.toy_engine import Engine


def launch(engine: Engine) -> tuple[StepPlan, StepResult]:
    plan = engine.scheduler.schedule(0.0)
    assert plan is not None
    return plan, engine.runner.execute(plan)


def land(engine: Engine, launched: tuple[StepPlan, StepResult]) -> None:
    engine.take(engine.scheduler.update(*launched, 0.0))
    engine.scheduler.check_integrity()


SPECULATIVE: dict[str, int | bool | frozenset[int] | None] = {"draft_tokens": 4, "token_budget": 40}
