"""Jobs that run in a trainer at the same time, and take their steps together where one forward can compute them.

Each job is a course (services.trainer.jobs.passes): its attempt from claim to end, which stops wherever it wants a pass
computed. A round computes what all of them want and lets each go on. So a job has its own state, errors, reports and
end, in the order in which it would have them alone; shared are forwards and backwards, and the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial

import structlog
import torch

from services.common.jobs import JobBase, Spec
from services.common.queue.consumer import ClaimedJob
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.base import JobRun
from services.trainer.jobs.passes import Pass, SharedRun, Sharing, compute_together, shares
from services.trainer.runtime.interleaving import Pauses, SideWork
from services.trainer.runtime.job_link import Draining, JobSession, NotBeside
from services.trainer.settings import TrainerSettings

SHARED_KINDS = frozenset({"sft"})
"""Kinds of jobs that may share."""


def may_share(spec: Spec) -> bool:
    """Whether a job may run beside others: its kind can, and no gate makes the others wait for a run of suites. A dry
    run measures time, of which others would take some."""
    return spec.kind in SHARED_KINDS and isinstance(spec, JobBase) and not spec.gates and not spec.dry_run


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of what is taken together.

    Raises:
        ValueError: a limit under which nothing can run.
    """

    jobs: int
    tokens: int
    """Tokens that the steps of all jobs read, at most."""

    def __post_init__(self) -> None:
        if self.jobs < 1 or self.tokens < 2:
            raise ValueError(f"at least one job and two tokens a step: {self}")

    @classmethod
    def of(cls, settings: TrainerSettings, device: torch.device) -> StepLimits:
        """Limits of the settings, and by device where they leave it open."""
        usual = 16384 if device.type == "cuda" else 1024
        return cls(settings.trainer_jobs_a_step, settings.trainer_tokens_a_step or usual)


@dataclass(eq=False, slots=True)
class _Job:
    """One job under way."""

    claimed: ClaimedJob
    session: JobSession
    course: Generator[Pass, None, None]
    shares: bool
    """Whether it may run beside others."""
    context: Context = field(default_factory=copy_context)
    """Its own: a course is inside of spans whenever it stops."""
    run: SharedRun | None = None
    """Once it has been admitted, if others may join it."""
    wanted: Pass | None = None
    """Pass that it waits for; None: it has ended, or has not begun."""
    going: bool = False
    """Whether its course runs now. It may be waiting for a store, with the others' courses going on inside of it."""

    def go_on(self, error: Exception | None = None) -> None:
        """Lets the course go on: what it wanted has been computed, or has failed with an error."""
        self.going = True
        try:
            if error is None:
                self.wanted = self.context.run(next, self.course)
            else:
                self.wanted = self.context.run(self.course.throw, error)
        except StopIteration:
            self.wanted = None
        finally:
            self.going = False


class SharedSteps:
    """The jobs that a trainer's thread runs now. Implements services.trainer.runtime.attempts.claim.Beside.

    Args:
        side: what the thread does beside them, in the pauses between forwards.
        stopping: set when no job goes on here.
    """

    def __init__(self, host: PolicyHost, limits: StepLimits, side: SideWork, stopping: threading.Event) -> None:
        self._host, self._limits, self._stopping = host, limits, stopping
        self._jobs: list[_Job] = []
        self._pause = Pauses(self._check, side)
        self._open = True
        """Whether further jobs may be taken beside those that run."""
        self._together = True
        self._log = structlog.get_logger("trainer")

    @property
    def has_room(self) -> bool:
        """Whether a further job may be tried beside those that run."""
        return self._open and len(self._jobs) < self._limits.jobs and all(job.run is not None for job in self._jobs)

    @property
    def active(self) -> bool:
        """Whether any job is under way."""
        return bool(self._jobs)

    @property
    def first(self) -> str | None:
        """Id of the job that has been here longest."""
        jobs = self._jobs[:1]
        return jobs[0].claimed.id if jobs else None

    def begin(
        self, claimed: ClaimedJob, session: JobSession, course: Generator[Pass, None, None], *, last: bool
    ) -> None:
        """Takes a job up; a job that shares nothing has ended when this returns.

        Args:
            last: it is the job's last attempt. What kills a process is tried alone then, and takes no others with it.
        """
        job = _Job(claimed, session, course, may_share(claimed.spec) and not last)
        self._jobs.append(job)
        job.go_on()
        self._forget_ended()

    def round(self) -> bool:
        """Computes what each job wants and lets it go on; False if none wants anything. Also called inside of a job's
        course that waits for a store: it has the others go on meanwhile.
        """
        groups: dict[tuple[Sharing, bool], list[tuple[_Job, Pass]]] = {}
        for job in self._jobs:
            if job.wanted is not None and not job.going:
                groups.setdefault((job.wanted.run.sharing, job.wanted.trained), []).append((job, job.wanted))
        for group in groups.values():
            present = [(job, wanted) for job, wanted in group if job.wanted is wanted]
            errors = self._computed(present)
            for job, wanted in present:
                if job.wanted is wanted:  # or it went on while another one waited
                    job.go_on(errors.get(job))
        self._forget_ended()
        return bool(groups)

    # Beside.

    def others(self) -> int:
        """See Beside."""
        return len(self._jobs) - 1

    def enter(self, job_id: str) -> None:
        """See Beside."""
        if self.others() and not self._job(job_id).shares:
            raise self.refused("it does not run beside others")

    def admit(self, job_id: str, run: JobRun) -> None:
        """See Beside."""
        job = self._job(job_id)
        running = [one.run for one in self._jobs if one is not job and one.run is not None]
        shared = run if job.shares and shares(run) else None
        tokens = 0 if shared is None else shared.step_tokens + sum(one.step_tokens for one in running)
        if self.others():
            if shared is None or any(one.sharing != shared.sharing for one in running):
                raise self.refused("its adapter or its microbatches have another shape than those that train here")
            if tokens > self._limits.tokens:
                raise self.refused(
                    f"its steps and those that are taken here read {tokens} tokens, over the {self._limits.tokens} "
                    "for steps that are taken together"
                )
            working = max(one.shared_working for one in (*running, shared))
            if not self._host.memory_budget.reserve_together(working):
                raise self.refused("there is no memory for it beside the jobs that train here")
            job.session.event("log", {"message": f"takes its steps together with those of {self.others()} other jobs"})
        job.run = shared if tokens <= self._limits.tokens else None

    def refused(self, reason: str) -> NotBeside:
        """See Beside. Until all of those here have ended no further ones are taken."""
        self._open = False
        return NotBeside(f"handed back to the queue: {reason}")

    # Parts.

    def _job(self, job_id: str) -> _Job:
        return next(job for job in self._jobs if job.claimed.id == job_id)

    def _check(self) -> None:
        """Raises if what is computed now is not to go on."""
        if self._stopping.is_set():
            raise Draining
        if len(self._jobs) == 1:
            self._jobs[0].session.check()

    def _computed(self, group: list[tuple[_Job, Pass]]) -> dict[_Job, Exception]:
        """Computes a pass of each job; returns the errors of those that do not go on as if nothing had happened."""
        if len(group) > 1 and self._together:
            errors: dict[_Job, Exception] = {}
            owners = {wanted: job for job, wanted in group}

            def goes_on(wanted: Pass) -> bool:
                job = owners[wanted]
                if job not in errors and (error := _raised(job.session.check)) is not None:
                    errors[job] = error
                return job not in errors

            failed = _raised(partial(compute_together, [wanted for _, wanted in group], self._pause, goes_on))
            if failed is None:
                return errors
            if isinstance(failed, Draining):
                return {job: Draining() for job, _ in group}
            self._separate(failed)
        found = {job: _raised(partial(self._alone, job, wanted)) for job, wanted in group}
        return {job: error for job, error in found.items() if error is not None}

    def _alone(self, job: _Job, wanted: Pass) -> None:
        def interrupt() -> None:
            self._pause()
            job.session.check()

        wanted.alone(interrupt)

    def _separate(self, error: Exception) -> None:
        """Has every job take its steps alone from now on, so that whichever is at fault fails alone."""
        self._together = False
        self._log.warning("steps.separated", exc_info=error)
        error.with_traceback(None)  # whose frames hold tensors
        if isinstance(error, torch.OutOfMemoryError):
            self._host.memory_budget.out_of_memory()

    def _forget_ended(self) -> None:
        self._jobs = [job for job in self._jobs if job.wanted is not None or job.going]
        if len(self._jobs) < 2:
            self._host.memory_budget.release_together()


def _raised(work: Callable[[], None]) -> Exception | None:
    """What the work raises."""
    try:
        work()
    except Exception as error:
        return error
    return None
