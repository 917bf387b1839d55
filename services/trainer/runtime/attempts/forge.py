"""One claimed forge job: what a forge needs of the trainer that runs it, and its progress in the job's record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from services.common.jobs import ForgeJob, JobProgress
from services.trainer.evaluation.run import Retry
from services.trainer.runtime.attempts.claim import Claim

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
    kept: Callable[[], None]
    """Told that a stage is finished, which need not be done again."""


Forge: TypeAlias = Callable[[str, ForgeJob, ForgeLink], Mapping[str, Any]]
"""Runs a job by its id and returns what is told when it has ended; raises what ends it otherwise."""


class ForgeAttempt:
    """Runs one claimed forge job, on the trainer's thread."""

    def __init__(self, forge: Forge, claim: Claim) -> None:
        self._forge = forge
        self._claim = claim
        self._stage = ""
        self._told = 0.0

    def run(self, spec: ForgeJob) -> None:
        """Does what is not done yet.

        Raises:
            JobLost, JobCancelled, Draining: it does not go on here.
            Exception: it failed.
        """
        claim = self._claim
        link = ForgeLink(self._progress, claim.pauses(), claim.until_back, claim.session.fence, claim.session.kept)
        with claim.trace.part("forge"):
            done = self._forge(claim.job.id, spec, link)
        claim.session.event("published", done)

    def _progress(self, finished: int, stages: int, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage == self._stage and done < total and now - self._told < _EVERY_SECONDS:
            return
        if stage != self._stage:
            self._claim.session.event("log", {"message": stage})
        self._stage, self._told = stage, now
        progress = JobProgress(step=finished, total_steps=stages)
        self._claim.report(progress, {}, stage_done=float(done), stage_total=float(total))
