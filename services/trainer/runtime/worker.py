"""The trainer thread: claims jobs, has each attempted (`attempts`) and writes its end, through every failure that a
job can outlive: claim → attempt → succeed, fail, retry or hand back. Small jobs run at the same time (`shared_steps`).
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from prometheus_client import CollectorRegistry

from services.common.adapters.events import AdapterEvents
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import InvalidRequest, TemperError, Unavailable, nothing_left
from services.common.evaluation.contamination.store import DataSource, TrainingHashes
from services.common.jobs import EvalJob, ForgeJob, JobBase
from services.common.queue.consumer import ClaimedJob, JobConsumer, JobLost
from services.common.storage.object_store import ObjectStore
from services.common.telemetry.tracing import NO_TRACER, Tracer
from services.trainer.evaluation.run import Evaluations
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.base import Prepare
from services.trainer.jobs.passes import Course
from services.trainer.memory.kernel_limits import refusal_of
from services.trainer.metrics import TrainerMetrics
from services.trainer.parent_versions import ParentVersions
from services.trainer.runtime.attempts.claim import Beside, Claim
from services.trainer.runtime.attempts.dry_run import DryRunAttempt
from services.trainer.runtime.attempts.evaluation import EvaluationAttempt
from services.trainer.runtime.attempts.forge import Forge, ForgeAttempt
from services.trainer.runtime.attempts.preparation import Parts
from services.trainer.runtime.attempts.training import JobAttempt
from services.trainer.runtime.checkpoint import CheckpointStore
from services.trainer.runtime.claims import JobClaims
from services.trainer.runtime.interleaving import NoSideWork, SideWork, work_or_wait
from services.trainer.runtime.job_link import PASSING, Draining, JobCancelled, JobSession, NotBeside, Paused
from services.trainer.runtime.job_trace import JobTrace
from services.trainer.runtime.publish import Publisher, VersionRetention
from services.trainer.runtime.shared_steps import SHARED_KINDS, SharedSteps, StepLimits
from services.trainer.runtime.until_back import BACKOFF_SECONDS, UntilBack
from services.trainer.settings import TrainerSettings

_IDLE_SECONDS = 1.0
_LOOK_SECONDS = 0.25
"""Between two looks for jobs to take beside those that run, where the last one found none."""
_ANSWER_SECONDS = 0.1
"""Time that those wait for the queue's answer."""


class TrainerWorker:
    """Runs jobs beside an engine in a thread of its own: one after another, and those that can share steps together.

    Args:
        host: the engine beside it.
        prepare: makes a runnable job of a spec; a TemperError of it fails the job with its message.
        forge: runs forge jobs; None: they are refused.
        metrics: None: counted, but not exported.
        side: what else this thread does, between jobs and in their pauses; None: nothing.
        tracer: gets spans of the jobs.
        receipt_key: signs receipts of what jobs publish; None: they are not signed.
    """

    def __init__(
        self,
        host: PolicyHost,
        settings: TrainerSettings,
        *,
        store: ObjectStore,
        registry: AdapterRegistry,
        prepare: Prepare,
        forge: Forge | None = None,
        metrics: TrainerMetrics | None = None,
        side: SideWork | None = None,
        tracer: Tracer = NO_TRACER,
        receipt_key: Ed25519PrivateKey | None = None,
    ) -> None:
        self._forge = forge
        self._host = host
        self._tracer = tracer
        self._settings = settings
        self._metrics = metrics or TrainerMetrics(CollectorRegistry())
        owner = settings.trainer_name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._consumer = JobConsumer(
            settings,
            owner=owner,
            reclaim_seconds=settings.job_reclaim_seconds,
            max_attempts=settings.job_max_attempts,
            left_over=partial(self._discard, published=False),
        )
        self._events = AdapterEvents(settings)
        self._checkpoints = CheckpointStore(store, settings.checkpoint_dir, keep=settings.checkpoints_kept)
        self._draining = threading.Event()
        self._deadline = float("inf")
        self._limits = StepLimits.of(settings, host.model.device)
        self._log = structlog.get_logger("trainer").bind(owner=owner)
        self._side: SideWork = side if side is not None else NoSideWork()
        self._awake = threading.Event()
        self._side.bind(self._awake.set)
        self._running = self._nothing()
        self._evaluations = Evaluations.of(store, registry, host)
        self._parts = Parts(
            host=host,
            settings=settings,
            registry=registry,
            prepare=prepare,
            consumer=self._consumer,
            checkpoints=self._checkpoints,
            publisher=Publisher(registry, self._events, host, settings.adapter_sync_seconds, receipt_key),
            parents=ParentVersions(registry, self._consumer, host.base_digest),
            retention=VersionRetention(settings, registry, self._consumer),
            training_hashes=TrainingHashes(registry),
            evaluations=self._evaluations,
            deadline=lambda: self._deadline,
        )
        session = partial(
            JobSession, self._consumer, heartbeat_seconds=settings.job_heartbeat_seconds, draining=self._draining
        )
        self._claims = JobClaims(self._consumer, session, draining=self._draining, wake=self._awake.set)
        self._begun = threading.Event()
        """Whether jobs are claimed."""
        self._thread = threading.Thread(target=self._live, name="trainer", daemon=True)

    @property
    def current_job(self) -> str | None:
        """Id of the job that runs here now; of several, of the one that began first."""
        return self._running.first

    @property
    def alive(self) -> bool:
        """Whether the trainer's thread runs, and claims jobs unless it drains; what liveness asks."""
        return self._thread.is_alive() and (self._claims.alive or self._draining.is_set() or not self._begun.is_set())

    def start(self) -> None:
        self._checkpoints.forget_old()
        self._thread.start()

    def stop_soon(self) -> None:
        """Claims nothing more, and has the running job end at its next look. What is away from now on is no failure."""
        if not self._draining.is_set():
            self._deadline = time.monotonic() + self._settings.trainer_drain_seconds
            self._draining.set()
            self._awake.set()

    def drain(self) -> bool:
        """Claims nothing more, has the running job checkpointed and handed back, and ends the thread.

        Blocks for up to ``trainer_drain_seconds``; False if the thread was still busy then (its job will be reclaimed
        by another trainer).
        """
        self.stop_soon()
        if self._thread.ident is not None:
            self._thread.join(self._settings.trainer_drain_seconds)
        if self._thread.is_alive():
            return False
        self._consumer.close()
        self._events.close()
        return True

    # The thread.

    def _live(self) -> None:
        try:
            self._loop()
        except Exception as error:
            # Of a job every error is met; this one says that the memory for training, or this code, is broken. The
            # process counts as dead from now on, and the claim of a job that was taken runs out.
            self._log.critical("the trainer's thread has died: liveness is off", exc_info=error)

    def _loop(self) -> None:
        self._host.memory_budget.start()
        claims = self._claims
        claims.start()
        self._begun.set()
        while not self._draining.is_set():
            self._awake.clear()
            found = claims.take()
            if found is not None:
                self._work(*found)
                claims.want()
            else:
                work_or_wait(self._side, self._awake, _IDLE_SECONDS)
            self._host.memory_budget.settle()
        claims.join()
        if (found := claims.take()) is not None:
            self._work(*found)  # which hands it back

    def _nothing(self) -> SharedSteps:
        return SharedSteps(self._host, self._limits, self._side, self._draining)

    def _work(self, claimed: ClaimedJob, session: JobSession) -> None:
        """Runs a job, and those that come meanwhile and share its steps, to their ends."""
        self._running = running = self._nothing()
        self._begin(running, claimed, session)
        looked = float("-inf")
        while running.active:
            while running.has_room and not self._draining.is_set() and time.monotonic() - looked > _LOOK_SECONDS:
                found = self._claims.take_beside(SHARED_KINDS, _ANSWER_SECONDS)
                if found is None:
                    looked = time.monotonic()
                else:
                    self._begin(running, *found)
            running.round()

    def _begin(self, running: SharedSteps, claimed: ClaimedJob, session: JobSession) -> None:
        course = self._course(claimed, session, running)
        running.begin(claimed, session, course, last=self._consumer.is_last(claimed))

    def _course(self, claimed: ClaimedJob, session: JobSession, beside: Beside) -> Course[None]:
        """One claimed job from its claim to its written end."""
        self._metrics.job_began(claimed.spec.kind)
        log = self._log.bind(job=claimed.id, attempt=claimed.attempt, adapter=claimed.spec.adapter)
        trace = JobTrace(self._tracer, claimed.job, claimed.attempt, claimed.traceparent)
        with trace.span:
            log.info("job.claimed", kind=claimed.spec.kind, beside=beside.others())
            try:
                attempt = self._result(claimed, session, trace, beside)
                outcome = yield from self._outcome(attempt, claimed, session, log)
                trace.ended(outcome)
            finally:
                self._host.memory_budget.release_job(claimed.id)
                self._metrics.job_ended()
            self._metrics.jobs.labels(outcome).inc()
            log.info("job.done", outcome=outcome)

    def _result(self, claimed: ClaimedJob, session: JobSession, trace: JobTrace, beside: Beside) -> Course[str]:
        """Runs the job; returns "name@n" if it published a version, else "". Raises what ends it otherwise."""
        until_back = UntilBack(session, self._side, self._draining, self._awake, self._log, beside.round)
        claim = Claim(claimed, session, trace, until_back, self._side, self._metrics, beside)
        beside.enter(claimed.id)
        try:
            return (yield from self._attempt(claim, claimed))
        except Exception as error:
            if nothing_left(error):
                until_back.await_resources(error, claimed.attempt)
            raise

    def _attempt(self, claim: Claim, claimed: ClaimedJob) -> Course[str]:
        if isinstance(claimed.spec, EvalJob):
            EvaluationAttempt(self._evaluations, claim).run(claimed.spec)
            return ""
        if isinstance(claimed.spec, ForgeJob):
            if self._forge is None:
                raise InvalidRequest("this engine forges no models", param="kind")
            ForgeAttempt(self._forge, claim).run(claimed.spec)
            return ""
        if isinstance(claimed.spec, JobBase) and claimed.spec.dry_run:
            yield from DryRunAttempt(self._parts, claim, claimed.spec).run()
            return ""
        return str((yield from JobAttempt(self._parts, claim, claimed.spec, self._log).run()))

    def _outcome(
        self, attempt: Course[str], claimed: ClaimedJob, session: JobSession, log: structlog.stdlib.BoundLogger
    ) -> Course[str]:
        try:
            with session:
                return (yield from self._run_and_settle(attempt, claimed, session, log))
        except JobLost:
            return "lost"
        except Exception:
            # Only a bug in settling itself comes here; the entry stays pending and is reclaimed.
            log.exception("job.unsettled")
            return "unsettled"

    def _run_and_settle(
        self, attempt: Course[str], claimed: ClaimedJob, session: JobSession, log: structlog.stdlib.BoundLogger
    ) -> Course[str]:
        """Runs the job and writes its end. Returns the outcome's name. Raises JobLost."""
        consumer = self._consumer
        try:
            version = yield from attempt
        except JobLost:
            raise
        except JobCancelled:
            self._settle(session, lambda: consumer.cancelled(claimed))
            self._discard(claimed.id, claimed.spec.adapter, published=False)
            return "cancelled"
        except NotBeside as error:
            log.info("job.requeued", reason=error.reason)
            reason = error.reason
            self._settle(session, lambda: consumer.requeue(claimed, reason))
            return "requeued"
        except Paused:
            self._settle(session, lambda: consumer.requeue(claimed, "paused"))
            return "paused"
        except Draining:
            self._settle(session, lambda: consumer.requeue(claimed))
            return "requeued"
        except PASSING as error:
            if not self._draining.is_set():
                return self._retry(claimed, session, error, log)
            log.info("job.requeued", reason=error.message)
            self._settle(session, lambda: consumer.requeue(claimed))
            return "requeued"
        except Exception as error:
            final = error if isinstance(error, TemperError) else refusal_of(error)
            if final is None:
                return self._retry(claimed, session, error, log)
            log.warning("job.failed", code=final.code, reason=final.message)
            message = final.message
            self._settle(session, lambda: consumer.fail(claimed, message))
            self._discard(claimed.id, claimed.spec.adapter, published=False)
            return "failed"
        self._settle(session, lambda: consumer.succeed(claimed, version))
        self._discard(claimed.id, claimed.spec.adapter, published=True)
        return "succeeded"

    def _retry(
        self, claimed: ClaimedJob, session: JobSession, error: Exception, log: structlog.stdlib.BoundLogger
    ) -> str:
        log.error("job.crashed", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
        ended = False

        def retry() -> None:
            nonlocal ended
            if nothing_left(error):  # no fault of the job's: its attempts are bounded in all
                self._consumer.kept(claimed)
            ended = not self._consumer.retry(claimed, reason)

        self._settle(session, retry)
        if ended:
            self._discard(claimed.id, claimed.spec.adapter, published=False)
        return "crashed"

    def _settle(self, session: JobSession, write: Callable[[], None]) -> None:
        """Writes the job's end behind its last report, however long Redis is away. Raises JobLost.

        A draining process gives up at its deadline: the job is then reclaimed, and its end is repeated.
        """
        session.ending()
        while True:
            try:
                if session.flush(BACKOFF_SECONDS[1]):
                    write()
                    return
            except Unavailable:
                time.sleep(BACKOFF_SECONDS[0])
            if time.monotonic() > self._deadline:
                raise Unavailable("Redis stayed away until this process had to end")

    def _discard(self, job_id: str, adapter: str, *, published: bool) -> None:
        """Removes what was kept for another attempt, and of a job that made no version what it learnt from."""
        try:
            self._checkpoints.discard(job_id)
            if not published and adapter:
                self._parts.training_hashes.forget(DataSource(adapter=adapter, job_id=job_id))
        except Unavailable as error:
            self._log.warning("checkpoint.left_behind", job=job_id, error=error.message)
