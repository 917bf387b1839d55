"""Steps on their way through the device, as the loop holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from services.engine.constraints.masks import RowMasks
from services.engine.executors.cuda.buffers import LoadedStep, StepShape
from services.engine.executors.cuda.prompt_scoring import Reports
from services.engine.executors.cuda.sampling.sampler import SampleRows
from services.engine.executors.cuda.speculation import PlacedRows, SampledChunks
from services.engine.executors.cuda.stream import Arrival
from services.engine.models.interface import DeviceForward
from services.engine.scheduler.step_plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class QueuedStep:
    """A step whose layers and logits are queued, and whose sampling is not. Nothing else may be queued before that."""

    forward: DeviceForward
    step: LoadedStep
    captured: StepShape | None
    x: Tensor
    """Output of the layers."""
    logits: Tensor | None
    """None: nothing is sampled."""
    sampling: SampleRows
    chunks: SampledChunks | None
    """Chunks that sample; None: without speculation."""
    placed: PlacedRows | None
    """Tokens of a masked step's decodes; None: without speculation."""
    drafts: bool
    """The mtp layer runs over the rows of the step."""
    num_draft_tokens: int
    """Draft tokens to draw behind each of the chunks."""
    reports: Reports | None
    """Prompt rows that are scored or pooled; None: none are."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on its way. The result is read once."""

    arrival: Arrival
    read: Callable[[], StepResult] | None
    """Reads the tokens on the host once they are there; None: the step sampled nothing."""
    reports: Reports | None = None
    """Same, what was read of prompts; None: nothing was."""

    def result(self) -> StepResult:
        """Waits for the device."""
        self.arrival.wait()
        result = self.read() if self.read is not None else StepResult(())
        return result if self.reports is None else replace(result, reports=self.reports())


@dataclass(slots=True)
class OpenedStep:
    """A step that waits for its masks while its layers run."""

    sample: Callable[[RowMasks], LaunchedStep]
    """Queues the sampling."""
    plan: StepPlan
    placed: PlacedRows | None
    """Tokens of its decodes; None: without speculation."""
    launched: LaunchedStep | None = None

    def drafts(self) -> Sequence[Sequence[int]]:
        if self.placed is not None:
            return self.placed.drafts()
        return [() for chunk in self.plan.chunks if chunk.samples]

    def seal(self, masks: RowMasks) -> None:
        self.launched = self.sample(masks)

    def result(self) -> StepResult:
        if self.launched is None:
            raise RuntimeError("the step was not sealed")
        return self.launched.result()
