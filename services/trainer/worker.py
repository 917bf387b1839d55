"""The trainer thread: claims jobs and drives them to the end, through every failure that a job can outlive.

claim → what to start from → prepare → resume → steps → publish → attach → serve → succeed. Everything after the last
step may happen twice (a process can die anywhere) and has the effect of happening once.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import structlog
from prometheus_client import CollectorRegistry

from services.common.consumer import ClaimedJob, JobConsumer, JobLost
from services.common.errors import DeadlineExceeded, InvalidRequest, NewerSchema, Overloaded, TemperError, Unavailable
from services.common.events import AdapterEvents
from services.common.jobs import JobProgress, MergeJob, Spec
from services.common.names import AdapterVersion
from services.common.registry import AdapterRegistry, Manifest
from services.common.store import ObjectStore
from services.common.tracing import NO_TRACER, Tracer
from services.trainer.checkpoint import Checkpoint, CheckpointStore, CheckpointWriter
from services.trainer.claims import JobClaims
from services.trainer.host import PolicyHost
from services.trainer.job_trace import JobTrace
from services.trainer.jobs.base import JobRun, Prepare
from services.trainer.ledger import MemoryTaken
from services.trainer.lesson import Lesson
from services.trainer.metrics import TrainerMetrics
from services.trainer.notes import Notes
from services.trainer.origins import Origin, Origins, continued, sampled_elsewhere
from services.trainer.publish import Publisher
from services.trainer.session import Draining, JobCancelled, JobSession
from services.trainer.settings import TrainerSettings
from services.trainer.side import NoSideWork, Pauses, SideWork, work_or_wait
from services.trainer.tidy import Tidier

_IDLE_SECONDS = 1.0
_BACKOFF_SECONDS = (0.25, 5.0)
"""First and longest pause between attempts to reach a store that is away."""
_ETA_WEIGHT = 0.2
"""Of the newest step in the moving average of step times."""
_PASSING = (Unavailable, Overloaded, DeadlineExceeded)
"""Errors that another attempt may not meet again."""

T = TypeVar("T")


class TrainerWorker:
    """Runs jobs beside an engine, one after another, in a thread of its own.

    Args:
        host: the engine beside it.
        prepare: makes a runnable job of a spec; a TemperError of it fails the job with its message.
        metrics: None: counted, but not exported.
        side: what else this thread does, between jobs and in their pauses; None: nothing.
        tracer: gets spans of the jobs.
    """

    def __init__(
        self,
        host: PolicyHost,
        settings: TrainerSettings,
        *,
        store: ObjectStore,
        registry: AdapterRegistry,
        prepare: Prepare,
        metrics: TrainerMetrics | None = None,
        side: SideWork | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._host = host
        self._tracer = tracer
        self._settings = settings
        self._registry = registry
        self._prepare = prepare
        self._metrics = metrics or TrainerMetrics(CollectorRegistry())
        owner = settings.trainer_name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._consumer = JobConsumer(
            settings,
            owner=owner,
            reclaim_seconds=settings.job_reclaim_seconds,
            max_attempts=settings.job_max_attempts,
        )
        self._events = AdapterEvents(settings)
        self._checkpoints = CheckpointStore(store, settings.checkpoint_dir, keep=settings.checkpoints_kept)
        self._publisher = Publisher(registry, self._events, host, settings.adapter_sync_seconds)
        self._origins = Origins(registry, self._consumer, host.base_digest)
        self._tidier = Tidier(settings, registry, self._consumer)
        self._draining = threading.Event()
        self._deadline = float("inf")
        self._current: str | None = None
        self._log = structlog.get_logger("trainer").bind(owner=owner)
        self._side: SideWork = side if side is not None else NoSideWork()
        self._awake = threading.Event()
        self._side.bind(self._awake.set)
        session = partial(
            JobSession, self._consumer, heartbeat_seconds=settings.job_heartbeat_seconds, draining=self._draining
        )
        self._claims = JobClaims(self._consumer, session, draining=self._draining, wake=self._awake.set)
        self._begun = threading.Event()
        """Whether jobs are claimed."""
        self._thread = threading.Thread(target=self._live, name="trainer", daemon=True)

    @property
    def current_job(self) -> str | None:
        """Id of the job that runs here now."""
        return self._current

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
        self._host.ledger.start()
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
            self._host.ledger.settle()
        claims.join()
        if (found := claims.take()) is not None:
            self._work(*found)  # which hands it back

    def _work(self, claimed: ClaimedJob, session: JobSession) -> None:
        self._current = claimed.id
        self._metrics.job_began(claimed.spec.kind)
        log = self._log.bind(job=claimed.id, attempt=claimed.attempt, adapter=claimed.spec.adapter)
        self._trace = JobTrace(self._tracer, claimed.job, claimed.attempt, claimed.traceparent)
        with self._trace.span:
            log.info("job.claimed", kind=claimed.spec.kind)
            try:
                outcome = self._outcome(claimed, session, log)
                self._trace.ended(outcome)
            finally:
                self._host.ledger.release_job()
                self._current = None
                self._metrics.job_ended()
            self._metrics.jobs.labels(outcome).inc()
            log.info("job.done", outcome=outcome)

    def _outcome(self, claimed: ClaimedJob, session: JobSession, log: structlog.stdlib.BoundLogger) -> str:
        try:
            with session:
                return self._run_and_settle(claimed, session, log)
        except JobLost:
            return "lost"
        except Exception:
            # Only a bug in settling itself comes here; the entry stays pending and is reclaimed.
            log.exception("job.unsettled")
            return "unsettled"

    def _run_and_settle(self, claimed: ClaimedJob, session: JobSession, log: structlog.stdlib.BoundLogger) -> str:
        """Runs the job and writes its end. Returns the outcome's name. Raises JobLost."""
        consumer = self._consumer
        try:
            version = self._run(claimed, session)
        except JobLost:
            raise
        except JobCancelled:
            self._settle(session, lambda: consumer.cancelled(claimed))
            self._discard(claimed)
            return "cancelled"
        except Draining:
            self._settle(session, lambda: consumer.requeue(claimed))
            return "requeued"
        except TemperError as error:
            if isinstance(error, _PASSING) and self._draining.is_set():
                log.info("job.requeued", reason=error.message)
                self._settle(session, lambda: consumer.requeue(claimed))
                return "requeued"
            if not isinstance(error, _PASSING):
                log.warning("job.failed", code=error.code, reason=error.message)
                message = error.message
                self._settle(session, lambda: consumer.fail(claimed, message))
                self._discard(claimed)
                return "failed"
            return self._retry(claimed, session, error, log)
        except Exception as error:
            return self._retry(claimed, session, error, log)
        self._settle(session, lambda: consumer.succeed(claimed, str(version)))
        self._discard(claimed)
        return "succeeded"

    def _retry(
        self, claimed: ClaimedJob, session: JobSession, error: Exception, log: structlog.stdlib.BoundLogger
    ) -> str:
        log.error("job.crashed", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
        self._settle(session, lambda: self._consumer.retry(claimed, reason))
        return "crashed"

    def _settle(self, session: JobSession, write: Callable[[], None]) -> None:
        """Writes the job's end behind its last report, however long Redis is away. Raises JobLost.

        A draining process gives up at its deadline: the job is then reclaimed, and its end is repeated.
        """
        session.ending()
        while True:
            try:
                if session.flush(_BACKOFF_SECONDS[1]):
                    write()
                    return
            except Unavailable:
                time.sleep(_BACKOFF_SECONDS[0])
            if time.monotonic() > self._deadline:
                raise Unavailable("Redis stayed away until this process had to end")

    def _discard(self, claimed: ClaimedJob) -> None:
        try:
            self._checkpoints.discard(claimed.id)
        except Unavailable as error:
            self._log.warning("checkpoint.left_behind", job=claimed.id, error=error.message)

    # One job.

    def _run(self, claimed: ClaimedJob, session: JobSession) -> AdapterVersion:
        spec = claimed.spec
        manifest = self._until_back(session, lambda: self._registry.published(spec.adapter, claimed.id))
        if manifest is None:
            done = self._train(claimed, session)
        else:
            done = manifest
            self._until_back(session, lambda: self._publisher.complete(done, session.fence), cancellable=False)
            session.event("log", {"message": f"an earlier attempt published {done.ref}"})
        with self._trace.part("serve", {"temper.adapter.version": str(done.ref)}):
            attached = self._until_back(
                session,
                lambda: self._publisher.serve(done, attach=spec.attach, fence=session.fence),
                cancellable=False,
            )
        session.event("published", {"adapter": str(done.ref), "attached": attached, "digest": done.digest})
        if removed := self._tidier.after_publish(spec.adapter):
            session.event("log", {"message": f"removed by retention: {', '.join(removed)}"})
        return done.ref

    def _train(self, claimed: ClaimedJob, session: JobSession) -> Manifest:
        self._registry.check_new_name(claimed.spec.adapter)
        with self._trace.part("prepare"):
            origins = self._origins.read(claimed, lambda operation: self._until_back(session, operation))
            run = self._until_back(session, lambda: self._prepared(claimed.spec, origins))
        lesson = Lesson(claimed.spec)
        notes = Notes(session, run)
        notes.tell(*run.notes, continued(claimed.spec, origins), sampled_elsewhere(claimed.spec, origins))
        notes.record({})
        start = 0
        checkpoint = None
        try:
            checkpoint = self._until_back(session, lambda: self._checkpoints.newest(claimed.id, claimed.spec_sha))
        except NewerSchema as error:
            session.event("log", {"message": f"checkpoint refused, starting over: {error.message}"})
        if checkpoint is not None:
            try:
                lesson.restore(checkpoint.state)
                start = run.load_state(checkpoint.state)
                session.event("log", {"message": f"resumed after step {start} of {run.total_steps}"})
            except InvalidRequest as error:
                self._log.warning("checkpoint.refused", job=claimed.id, error=error.message)
                session.event("log", {"message": f"checkpoint refused, starting over: {error.message}"})
                run = self._until_back(session, lambda: self._prepared(claimed.spec, origins))
                lesson = Lesson(claimed.spec)
        if before := lesson.acceptance.begin(run, session.check):
            session.event("eval", {"step": 0, **before})

        def saved(step: int, where: str) -> None:
            session.event("checkpoint", {"step": step, "where": where})
            self._trace.span.event("checkpoint", {"temper.job.step": step, "where": where})

        writer = CheckpointWriter(
            self._checkpoints,
            claimed.id,
            claimed.spec_sha,
            allowed=lambda: not session.lost,
            saved=saved,
            stamp=lesson.stamp,
            fence=int(claimed.fence),
        )
        try:
            metrics = self._steps(claimed, session, run, writer, start, lesson)
            notes.tell(lesson.note(run, metrics))
            notes.record(metrics)
            metrics |= lesson.acceptance.check(run, metrics if start < run.total_steps else None, session.check)
            with self._trace.part("publish"):
                return self._publish(claimed, session, run, writer, origins, metrics)
        finally:
            writer.close()

    def _prepared(self, spec: Spec, origins: Sequence[Origin]) -> JobRun:
        if isinstance(spec, MergeJob):
            return self._prepare(spec, self._host, None, origins)
        return self._prepare(spec, self._host, origins[0].files if origins else None)

    def _steps(
        self,
        claimed: ClaimedJob,
        session: JobSession,
        run: JobRun,
        writer: CheckpointWriter,
        start: int,
        lesson: Lesson,
    ) -> dict[str, float]:
        """Runs the remaining steps; returns the newest metrics. Raises JobLost, JobCancelled, Draining."""
        total = run.total_steps
        metrics = dict(claimed.job.metrics) if start > 0 else {}
        seconds: float | None = None
        saved = start
        done = start
        beginning = JobProgress(step=start, total_steps=total)
        session.report(beginning, {})
        self._metrics.progress(claimed.spec.kind, beginning, {})
        pauses = Pauses(session.check, self._side)
        try:
            lesson.begin(run, pauses)
            for index in range(start, total):
                session.check()
                began = time.monotonic()
                with self._trace.step(index, total):
                    newest = run.step(index, pauses)
                took = time.monotonic() - began
                done = index + 1
                seconds = took if seconds is None else (1 - _ETA_WEIGHT) * seconds + _ETA_WEIGHT * took
                self._metrics.step_seconds.observe(took)
                metrics |= newest
                lesson.saw(newest)
                progress = JobProgress(step=done, total_steps=total, eta_seconds=round(seconds * (total - done), 3))
                session.report(progress, {**newest, "step_seconds": round(took, 6)})
                self._metrics.progress(claimed.spec.kind, progress, newest)
                evaluation = {name: value for name, value in newest.items() if name.startswith("eval_")}
                if evaluation:
                    session.event("eval", {"step": done, **evaluation})
                if done % claimed.spec.checkpoint_every == 0 and done < total:
                    writer.submit(Checkpoint(done, run.state()))
                    saved = done
            metrics |= lesson.end(run, metrics, pauses)
        except Draining:
            if done > saved:
                writer.submit(Checkpoint(done, run.state()))
            writer.flush(self._remaining())
            raise
        return metrics

    def _publish(
        self,
        claimed: ClaimedJob,
        session: JobSession,
        run: JobRun,
        writer: CheckpointWriter,
        origins: Sequence[Origin],
        metrics: Mapping[str, float],
    ) -> Manifest:
        files = run.lora.to_files(self._settings.served_model_name)
        lineage = run.lineage
        parent = origins[0].version if origins and lineage is None else None
        total = run.total_steps
        try:
            if not self._until_back(session, lambda: self._consumer.publishing(claimed)):
                raise JobCancelled
            return self._until_back(
                session,
                lambda: self._publisher.publish(
                    claimed.spec.adapter,
                    claimed.id,
                    files,
                    parent=parent,
                    lineage=lineage,
                    metrics=metrics,
                    fence=session.fence,
                ),
                # The work is done: keep it on disk, should this process end before the stores are back.
                away=lambda: writer.submit(Checkpoint(total, run.state())),
                cancellable=False,
            )
        except Draining:
            writer.submit(Checkpoint(total, run.state()))
            writer.flush(self._remaining())
            raise

    def _until_back(
        self,
        session: JobSession,
        operation: Callable[[], T],
        *,
        away: Callable[[], None] | None = None,
        cancellable: bool = True,
    ) -> T:
        """Repeats an operation while a store is away, or memory taken. Raises JobLost, JobCancelled, Draining."""
        pause, longest = _BACKOFF_SECONDS
        first = True
        while True:
            session.check(cancellable=cancellable)
            try:
                return operation()
            except Unavailable as error:
                if first:
                    first = False
                    event = "memory.taken" if isinstance(error, MemoryTaken) else "store.away"
                    self._log.warning(event, error=error.message)
                    session.event("log", {"message": f"waiting: {error.message}"})
                    if away is not None:
                        away()
            self._pause(pause)
            pause = min(2 * pause, longest)

    def _pause(self, seconds: float) -> None:
        """Waits, and does side work meanwhile."""
        until = time.monotonic() + seconds
        while not self._draining.is_set() and (left := until - time.monotonic()) > 0:
            self._awake.clear()
            work_or_wait(self._side, self._awake, left)

    def _remaining(self) -> float:
        return max(0.5, min(self._deadline - time.monotonic(), self._settings.trainer_drain_seconds) - 1.0)
