"""Prints the step plan of every step: `python -m benchmarks.serving.step_plans --cases 3x40x4`.

Runs a case of requests x prompt tokens x new tokens on an engine in this process and says what each step was planned to
compute: who decodes, whose prompt is computed from where to where, which states and blocks are copied. For reading how
the scheduler behaves, not for speed. `--prefix-cache` runs the case twice, the second time behind what the first left.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.lib.cases import Case
from benchmarks.lib.in_process import InProcessEngine
from services.engine.scheduler.step_plan import Chunk, StepPlan
from services.engine.settings import EngineSettings


def describe(plan: StepPlan) -> str:
    """A plan in one line.

    Returns:
        The requests that decode, with the number of draft tokens that are checked, then each prefill chunk as
        request:from-to, the number of draft tokens to draw behind each, then copies.
    """
    decodes = plan.num_decodes
    parts = [f"{plan.num_tokens} tokens"]
    if decodes:
        parts.append("decode " + " ".join(_decode(chunk) for chunk in plan.chunks[:decodes]))
    for chunk in plan.chunks[decodes:]:
        parts.append(f"prefill {chunk.request.request_id}:{chunk.start}-{chunk.start + len(chunk.token_ids)}")
    if plan.num_draft_tokens:
        parts.append(f"draw {plan.num_draft_tokens}")
    for name, copies in (
        ("restore", plan.copies_before),
        ("snapshot", plan.copies_after),
        ("copy block", plan.block_copies),
    ):
        if copies:
            parts.append(f"{name} " + " ".join(f"{copy.source}->{copy.target}" for copy in copies))
    return "; ".join(parts)


def _decode(chunk: Chunk) -> str:
    checked = f"+{chunk.num_draft_tokens}" if chunk.num_draft_tokens else ""
    return chunk.request.request_id + checked


def dump(engine: InProcessEngine, case: Case, *, repeats: int = 1) -> list[StepPlan]:
    """Runs a case; returns the plans of its steps in order."""
    plans: list[StepPlan] = []
    scheduler = engine.pipeline.scheduler
    schedule = scheduler.schedule

    def recorded(now: float) -> StepPlan | None:
        plan = schedule(now)
        if plan is not None:
            plans.append(plan)
        return plan

    prompts = engine.prompts(case.requests, case.prompt_tokens)
    scheduler.schedule = recorded  # type: ignore[method-assign]
    try:
        for _ in range(repeats):
            engine.generate(prompts, case.new_tokens)
    finally:
        scheduler.schedule = schedule  # type: ignore[method-assign]
    return plans


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"), help="checkpoint directory")
    parser.add_argument("--cases", default="3x40x4", help="requests x prompt tokens x new tokens, comma between cases")
    parser.add_argument("--prefix-cache", action="store_true", help="run each case twice, with the prefix cache on")
    options = parser.parse_args()
    engine = InProcessEngine(EngineSettings(model=options.model), prefix_cache=options.prefix_cache)
    try:
        for text in options.cases.split(","):
            case = Case.parse(text)
            for number, plan in enumerate(dump(engine, case, repeats=2 if options.prefix_cache else 1), 1):
                sys.stdout.write(f"{text} step {number}: {describe(plan)}\n")
    finally:
        engine.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
