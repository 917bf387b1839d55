"""One claimed evaluation, from its first open shard to its result. Every write may happen twice and counts once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from services.common.jobs import EvalJob, JobProgress
from services.common.queue.consumer import ClaimedJob
from services.trainer.evaluation.run import EvaluationRun, Evaluations
from services.trainer.metrics import TrainerMetrics
from services.trainer.runtime.interleaving import Pauses, SideWork
from services.trainer.runtime.job_link import JobSession
from services.trainer.runtime.job_trace import JobTrace
from services.trainer.runtime.until_back import UntilBack


class EvaluationAttempt:
    """Runs one claimed evaluation, on the trainer's thread.

    Args:
        session: the job's line to Redis.
        side: what the thread does beside it.
    """

    def __init__(
        self,
        evaluations: Evaluations,
        metrics: TrainerMetrics,
        side: SideWork,
        claimed: ClaimedJob,
        session: JobSession,
        trace: JobTrace,
        until_back: UntilBack,
    ) -> None:
        self._evaluations = evaluations
        self._metrics = metrics
        self._side = side
        self._claimed = claimed
        self._session = session
        self._trace = trace
        self._until_back = until_back

    def run(self, spec: EvalJob) -> None:
        """Answers what is left and writes the result.

        Raises:
            JobLost, JobCancelled, Draining: it does not go on here.
            Exception: it failed.
        """
        claimed = self._claimed
        run = EvaluationRun(
            self._evaluations,
            claimed.id,
            spec,
            key_id=claimed.job.key_id or "",
            retry=self._until_back,
            interrupt=Pauses(self._session.check, self._side),
            watcher=_Reports(self._session, self._metrics, claimed.spec.kind),
        )
        with self._trace.part("evaluate"):
            run.run()


class _Reports:
    """Reports of a run's progress to the job's record."""

    def __init__(self, session: JobSession, metrics: TrainerMetrics, kind: str) -> None:
        self._session = session
        self._metrics = metrics
        self._kind = kind
        self._began: tuple[float, int] | None = None

    def progress(self, done: int, total: int) -> None:
        """See Watcher.progress. The time left follows from what this attempt has done."""
        now = time.monotonic()
        began, first = self._began = self._began or (now, done)
        eta = (now - began) / (done - first) * (total - done) if done > first else None
        progress = JobProgress(step=done, total_steps=total, eta_seconds=None if eta is None else round(eta, 3))
        self._session.report(progress, {})
        self._metrics.progress(self._kind, progress, {})

    def event(self, data: Mapping[str, Any]) -> None:
        """See Watcher.event."""
        self._session.event("eval", data)
