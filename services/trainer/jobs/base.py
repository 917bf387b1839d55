"""Interface of a prepared job, which the worker drives step by step and can resume at every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from services.common.jobs import PublishingSpec
from services.common.jobs.documents import Document

if TYPE_CHECKING:
    from services.common.adapters.manifest import Lineage
    from services.engine.models.lora.trainable import LoraParams
    from services.trainer.host.policy_host import PolicyHost
    from services.trainer.parent_versions import ParentVersion


UNDER_WAY = "found"
"""Name in a state's data: metrics of the step under way, as far as it has come."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything a resumed run needs to continue as if it had never stopped.

    ``tensors`` are detached copies on the CPU (float32 masters, optimizer moments), so a checkpoint
    may be written while the run goes on. ``data`` is JSON (step, data cursor, counters).
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def under_way(self) -> bool:
        """Whether there is more in it than behind the last finished step: a part of the next one."""
        return bool(self.data.get(UNDER_WAY))


@dataclass(frozen=True, slots=True)
class RunData:
    """Data of a run, as far as it is known: a job that samples for itself has none before its first step."""

    unit: str
    """Word for what an optimizer step is made of."""
    units: Sequence[Sequence[Document]]
    """Documents of each unit that something is learnt from."""
    held_out: int = 0
    rewards: Sequence[Sequence[float]] = ()
    """Rewards of each group, those that nothing is learnt from included."""
    groups_skipped: int = 0
    """Groups without spread."""


def _uninterrupted() -> None:
    """The default interrupt: never ends a step."""


class JobRun(Protocol):
    """A prepared job. One thread drives it: ``for i in range(start, run.total_steps): run.step(i)``."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole job, at least 1."""
        ...

    @property
    def lora(self) -> LoraParams | None:
        """The adapter as it is now; None: the job makes a drafter."""
        ...

    def files(self, base_model_name: str) -> dict[str, bytes]:
        """Files of the version that the result as it is now would be."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about the prepared data (examples dropped, groups skipped), which become log events."""
        ...

    @property
    def outcome(self) -> tuple[str, ...]:
        """Notes for the user about what the steps so far came upon."""
        ...

    @property
    def settings(self) -> Mapping[str, float]:
        """Settings that the job trains with, given or chosen: learning_rate, steps, epochs, …"""
        ...

    @property
    def defaults(self) -> Mapping[str, float]:
        """Settings that a job may leave open, as they would then be."""
        ...

    @property
    def lineage(self) -> Lineage | None:
        """Lineage of the result, if it was made without training."""
        ...

    def evaluate(self, interrupt: Callable[[], None] = _uninterrupted) -> dict[str, float]:
        """Metrics of the adapter as it is on what is held out, with the prefix ``eval_``; {} if nothing is.

        Of a job that evaluates, the last step evaluates, too.
        """
        ...

    def examine(self, interrupt: Callable[[], None] = _uninterrupted) -> dict[str, float]:
        """Metrics of how well the adapter as it is knows the job's own examples, or a bounded number of them spread
        evenly: `loss`, and others by the method; {} if the job has no examples of its own. Changes nothing."""
        ...

    def step(self, index: int, interrupt: Callable[[], None] = _uninterrupted) -> dict[str, float]:
        """Runs optimizer step ``index`` (from 0, in order) and returns its metrics.

        Takes the host's compute gate itself. Metrics of an evaluation that fell on this step have the prefix
        ``eval_``. ``interrupt`` is called between microbatches and may raise (cancelled, draining, job lost): the
        exception passes through, and ``state()`` is one in which the same step comes next: either nothing of it has
        been applied, or only its evaluation is left, and it returns what it would have without the interruption.
        """
        ...

    def close(self) -> None:
        """Ends what the run has under way beside its steps, however it ended."""
        ...

    def state(self) -> RunState:
        """A checkpoint that resumes after the last finished step."""
        ...

    def load_state(self, state: RunState) -> int:
        """Restores a checkpoint of the same spec and returns the index of the next step to run.

        Raises:
            InvalidRequest: the checkpoint belongs to another spec or shape.
        """
        ...


class Prepare(Protocol):
    """Makes a runnable job of a spec: services.trainer.jobs.prepare_run."""

    def __call__(
        self,
        spec: PublishingSpec,
        host: PolicyHost,
        parent: Mapping[str, bytes] | None,
        sources: Sequence[ParentVersion] = ...,
        interrupt: Callable[[], None] = ...,
        /,
    ) -> JobRun: ...
