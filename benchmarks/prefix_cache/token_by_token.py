"""Runs the plans of a scheduler one token at a time, as the reference of what a chunk computes at once."""

from __future__ import annotations

from dataclasses import replace

from services.engine.executors.cpu.runner import ModelRunner
from services.engine.scheduler.step_plan import Chunk, StateCopy, StepPlan, StepResult


class TokenByToken:
    """Gives a runner the plans of a scheduler a token at a time."""

    depth = 1

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a plan without speculation.

        Raises:
            ValueError: it has draft tokens, or reads prompts.
        """
        if plan.reads or any(chunk.num_draft_tokens or chunk.out_slot for chunk in plan.chunks):
            raise ValueError("a plan with draft tokens or prompt reads cannot be run token by token")
        return StepResult([token for step in single_steps(plan) for token in self._runner.execute(step).tokens])


def single_steps(plan: StepPlan) -> list[StepPlan]:
    """Step plan cut into steps of one token: its copies before, behind and within its chunks lie between them."""
    steps = [StepPlan([single], copies_after=copies) for chunk in plan.chunks for single, copies in _singles(chunk)]
    steps[0] = replace(plan, chunks=steps[0].chunks, copies_after=steps[0].copies_after)
    steps[-1] = replace(steps[-1], copies_after=[*steps[-1].copies_after, *plan.copies_after])
    return steps


def _singles(chunk: Chunk) -> list[tuple[Chunk, list[StateCopy]]]:
    """Tokens of a chunk as chunks, each with the snapshots behind it."""
    last = chunk.start + len(chunk.token_ids) - 1
    snapshots: dict[int, list[StateCopy]] = {}
    for position, slot in chunk.snapshots:
        snapshots.setdefault(position - 1, []).append(StateCopy(chunk.slot, slot))
    made: list[tuple[Chunk, list[StateCopy]]] = []
    for position, token in enumerate(chunk.token_ids, start=chunk.start):
        samples = chunk.samples and position == last
        behind = chunk.next_id if position == last else chunk.token_ids[position + 1 - chunk.start]
        single = chunk._replace(token_ids=(token,), start=position, samples=samples, next_id=behind, snapshots=())
        made.append((single, snapshots.get(position, [])))
    return made
