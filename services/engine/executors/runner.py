"""Interface of the executors: a runner launches step plans, and a step handle has the result. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.engine.constraints.masks import RowMasks
from services.engine.scheduler.draft_depth import StepCosts
from services.engine.scheduler.step_plan import StepPlan, StepResult


class StepHandle(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Waits for the step; raises what it raised. Called once."""
        ...


class OpenStep(StepHandle, Protocol):
    """A step whose tokens are not sampled before its masks are there."""

    def drafts(self) -> Sequence[Sequence[int]]:
        """Draft tokens of each chunk that samples, for the masks behind them; waits until they are known."""
        ...

    def seal(self, masks: RowMasks) -> None:
        """Samples under these masks, which are read before it returns. Called once, before ``result`` and before the
        next launch."""
        ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """The StepHandle of a runner that computes in ``launch``."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


class Runner(Protocol):
    """Runs plans in the order of their launch. Any exception ends the requests of the step."""

    @property
    def depth(self) -> int:
        """Plans that may be in flight: 1 if ``launch`` computes, 2 if it only queues work on a device."""
        ...

    @property
    def costs(self) -> StepCosts | None:
        """Seconds of its steps with and without draft tokens; None: it has not measured them."""
        ...

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts one step behind those in flight; a plan that is not ``masked``."""
        ...

    def open(self, plan: StepPlan) -> OpenStep:
        """Starts one step behind those in flight, up to its logits; a plan that is ``masked``."""
        ...
