"""One claimed evaluation, from its first open shard to its result. Every write may happen twice and counts once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from services.common.jobs import EvalJob, JobProgress
from services.trainer.evaluation.run import EvaluationRun, Evaluations
from services.trainer.runtime.attempts.claim import Claim


class EvaluationAttempt:
    """Runs one claimed evaluation, on the trainer's thread."""

    def __init__(self, evaluations: Evaluations, claim: Claim) -> None:
        self._evaluations = evaluations
        self._claim = claim

    def run(self, spec: EvalJob) -> None:
        """Answers what is left and writes the result.

        Raises:
            JobLost, JobCancelled, Draining: it does not go on here.
            Exception: it failed.
        """
        claim = self._claim
        run = EvaluationRun(
            self._evaluations,
            claim.job.id,
            spec,
            key_id=claim.job.job.key_id or "",
            retry=claim.until_back,
            interrupt=claim.pauses(),
            watcher=_Reports(claim),
        )
        with claim.trace.part("evaluate"):
            run.run()


class _Reports:
    """Reports of a run's progress to the job's record."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._began: tuple[float, int] | None = None

    def progress(self, done: int, total: int) -> None:
        """See Watcher.progress. The time left follows from what this attempt has done."""
        now = time.monotonic()
        began, first = self._began = self._began or (now, done)
        eta = (now - began) / (done - first) * (total - done) if done > first else None
        progress = JobProgress(step=done, total_steps=total, eta_seconds=None if eta is None else round(eta, 3))
        self._claim.report(progress, {})

    def event(self, data: Mapping[str, Any]) -> None:
        """See Watcher.event."""
        self._claim.session.event("eval", data)

    def kept(self) -> None:
        """See Watcher.kept."""
        self._claim.session.kept()
