"""Speculation with a chosen share of right draft tokens, for its speed where no trained mtp layer is at hand.

What a draft token costs does not depend on whether it is right; what follows from it does. So the share is imposed
where the host reads the results: a sampled token is replaced by the draft token for it, or by another token. The text
means nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from services.engine.executors.runner import OpenStep, Runner, StepHandle
from services.engine.scheduler.step_plan import StepPlan, StepResult


class ChosenAcceptance:
    """A runner whose draft tokens are right as often as wanted.

    Args:
        share: of the draft tokens, 0 to 1.
    """

    def __init__(self, runner: Runner, share: float, seed: int = 0) -> None:
        self._runner, self._share = runner, share
        self._random = random.Random(seed)

    @property
    def depth(self) -> int:
        return self._runner.depth

    def launch(self, plan: StepPlan) -> StepHandle:
        """Launches the step as it is."""
        return _Handle(self, plan, self._runner.launch(plan))

    def open(self, plan: StepPlan) -> OpenStep:
        """Not supported: nothing is drafted for constrained requests."""
        raise ValueError(f"no request here is constrained, but a step of {len(plan.chunks)} chunks is")

    def imposed(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result with the wanted tokens in front of the draft tokens' own rows."""
        tokens = list(result.tokens)
        at = 0
        for chunk in plan.chunks:
            if chunk.num_draft_tokens:
                draft = chunk.token_ids[-1]
                right = self._random.random() < self._share
                if right or tokens[at].token_id == draft:
                    tokens[at] = tokens[at]._replace(token_id=draft if right else max(draft - 1, 1))
            at += chunk.sampled_rows
        return replace(result, tokens=tokens)


@dataclass(frozen=True, slots=True)
class _Handle:
    runner: ChosenAcceptance
    plan: StepPlan
    handle: StepHandle

    def result(self) -> StepResult:
        return self.runner.imposed(self.plan, self.handle.result())
