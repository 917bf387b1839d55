"""One claimed forge job: what a forge needs of the trainer that runs it, and its progress in the job's record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from services.common.jobs import ForgeJob, JobProgress
from services.common.queue.consumer import ClaimedJob
from services.trainer.evaluation.run import Retry
from services.trainer.metrics import TrainerMetrics
from services.trainer.runtime.interleaving import Pauses, SideWork
from services.trainer.runtime.job_link import JobSession
from services.trainer.runtime.job_trace import JobTrace
from services.trainer.runtime.until_back import UntilBack

_EVERY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class ForgeLink:
    """Line of a forge to the trainer that runs its job."""

    progress: Callable[[int, int, str, int, int], None]
    """Told the number of finished stages, of all stages, the present one, how much of it is done, and how much there
    is."""
    interrupt: Callable[[], None]
    """Called several times a second; raises if the job does not go on here."""
    retry: Retry
    """Repeats what needs a store or memory."""
    fence: Callable[[], None]
    """Proves the ownership of the job right now."""


Forge: TypeAlias = Callable[[str, ForgeJob, ForgeLink], Mapping[str, Any]]
"""Runs a job by its id and returns what is told when it has ended; raises what ends it otherwise."""


class ForgeAttempt:
    """Runs one claimed forge job, on the trainer's thread.

    Args:
        session: the job's line to Redis.
        side: what the thread does beside it.
    """

    def __init__(
        self,
        forge: Forge,
        metrics: TrainerMetrics,
        side: SideWork,
        claimed: ClaimedJob,
        session: JobSession,
        trace: JobTrace,
        until_back: UntilBack,
    ) -> None:
        self._forge = forge
        self._metrics = metrics
        self._claimed = claimed
        self._session = session
        self._trace = trace
        self._until_back = until_back
        self._pauses = Pauses(session.check, side)
        self._stage = ""
        self._told = 0.0

    def run(self, spec: ForgeJob) -> None:
        """Does what is not done yet.

        Raises:
            JobLost, JobCancelled, Draining: it does not go on here.
            Exception: it failed.
        """
        link = ForgeLink(self._progress, self._pauses, self._until_back, self._session.fence)
        with self._trace.part("forge"):
            done = self._forge(self._claimed.id, spec, link)
        self._session.event("published", done)

    def _progress(self, finished: int, stages: int, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage == self._stage and done < total and now - self._told < _EVERY_SECONDS:
            return
        if stage != self._stage:
            self._session.event("log", {"message": stage})
        self._stage, self._told = stage, now
        progress = JobProgress(step=finished, total_steps=stages)
        self._session.report(progress, {"stage_done": float(done), "stage_total": float(total)})
        self._metrics.progress(self._claimed.spec.kind, progress, {})
