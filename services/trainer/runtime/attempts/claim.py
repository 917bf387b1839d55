"""A claimed job as its attempt has it, whatever kind it is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from services.common.jobs import JobProgress
from services.common.queue.consumer import ClaimedJob
from services.trainer.jobs.base import JobRun
from services.trainer.metrics import TrainerMetrics
from services.trainer.runtime.interleaving import Pauses, SideWork
from services.trainer.runtime.job_link import JobSession, NotBeside
from services.trainer.runtime.job_trace import JobTrace
from services.trainer.runtime.until_back import UntilBack


class Beside(Protocol):
    """The jobs that run in a trainer at the same time, as one of them sees them."""

    def others(self) -> int:
        """Number of the others."""
        ...

    def round(self) -> bool:
        """Lets the others go on by a step while a job waits for a store; False if none can."""
        ...

    def enter(self, job_id: str) -> None:
        """A job's attempt begins.

        Raises:
            NotBeside: it is of a kind that runs without others.
        """
        ...

    def refused(self, reason: str) -> NotBeside:
        """Error for a job that cannot run beside the others; it comes next when those have ended."""
        ...

    def admit(self, job_id: str, run: JobRun) -> None:
        """A job has been prepared, and takes part from now on.

        Raises:
            NotBeside: it cannot be computed together with the others.
        """
        ...


@dataclass(frozen=True, slots=True)
class Claim:
    """One claimed job, and what its attempt needs of the trainer's thread."""

    job: ClaimedJob
    session: JobSession
    """The job's line to Redis."""
    trace: JobTrace
    until_back: UntilBack
    side: SideWork
    """What the thread does beside it."""
    metrics: TrainerMetrics
    beside: Beside
    """The jobs that run here at the same time."""

    def pauses(self) -> Pauses:
        """Interrupt of the job's work from now on."""
        return Pauses(self.session.check, self.side)

    def report(self, progress: JobProgress, newest: Mapping[str, float], **more: float) -> None:
        """Tells the progress in the job's record and in the trainer's metrics.

        Args:
            newest: what the work has measured, for both.
            more: for the record only.
        """
        self.session.report(progress, {**newest, **more})
        self.metrics.progress(self.job.spec.kind, progress, newest)
