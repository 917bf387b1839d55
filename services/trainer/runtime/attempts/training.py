"""One claimed job from what it starts from to its published version.

what to start from → prepare → resume → steps → publish → attach → serve. Everything after the last step may happen
twice (a process can die anywhere) and has the effect of happening once.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import structlog

from services.common.adapters.evidence import GateEvidence
from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import Manifest
from services.common.errors import InvalidRequest, NewerSchema
from services.common.jobs import GrpoJob, JobProgress, OpdJob, PublishingSpec, SftJob
from services.common.jobs.fields.dataset import OfDataset
from services.common.jobs.fields.drafter import RefreshesDrafter
from services.common.jobs.kinds.draft import refresh
from services.common.jobs.record import NOT_PUBLISHED
from services.common.queue.records import finite
from services.trainer.jobs.base import JobRun
from services.trainer.jobs.passes import Course, steps_of
from services.trainer.parent_versions import ParentVersion
from services.trainer.runtime.attempts.acceptance import NotPublished
from services.trainer.runtime.attempts.claim import Claim
from services.trainer.runtime.attempts.epoch_versions import EpochVersions
from services.trainer.runtime.attempts.gates import PUBLISH, Gates, attaches, becomes_current, digest_of
from services.trainer.runtime.attempts.learning_check import LearningCheck
from services.trainer.runtime.attempts.preparation import Notes, Parts, Preparation
from services.trainer.runtime.attempts.receipt import receipt_of
from services.trainer.runtime.checkpoint import Checkpoint, CheckpointWriter
from services.trainer.runtime.job_link import PASSING, Draining, JobCancelled

_NO_DRAFTER = (
    "this engine follows no drafter: start it with TEMPER_SPECULATIVE=mtp and TEMPER_DRAFTER set to a name, or leave "
    "draft out"
)
_ETA_WEIGHT = 0.2
"""Weight of the newest step in the moving average of step times."""
_METRICS = "metrics"
"""Name in a checkpoint's data."""


class JobAttempt(Preparation[PublishingSpec]):
    """Runs one claimed job, on the trainer's thread."""

    def __init__(self, parts: Parts, claim: Claim, spec: PublishingSpec, log: structlog.stdlib.BoundLogger) -> None:
        super().__init__(parts, claim, spec)
        self._log = log

    def run(self) -> Course[AdapterVersion]:
        """The version that came of the job; wants those passes computed that may be computed together with others'.

        Raises:
            JobLost, JobCancelled, Draining, NotBeside: it does not go on here.
            Exception: it failed.
        """
        claimed, session, spec = self._claim.job, self._claim.session, self._spec
        parts = self._parts
        gates = Gates(parts.evaluations, parts.training_hashes, self._claim, spec)
        manifest = self._claim.until_back(lambda: self._parts.registry.published(spec.adapter, claimed.id))
        if manifest is None:
            done = yield from self._train(gates)
        else:
            done = manifest
            if becomes_current(spec):
                self._claim.until_back(lambda: self._parts.publisher.complete(done, session.fence), cancellable=False)
            session.event("log", {"message": f"an earlier attempt published {done.ref}"})
        self._claim.until_back(lambda: gates.published(done), cancellable=False)
        attach = attaches(spec, done.gates)
        with self._claim.trace.part("serve", {"temper.adapter.version": str(done.ref)}):
            attached = self._claim.until_back(
                lambda: self._parts.publisher.serve(done, attach=attach, fence=session.fence),
                cancellable=False,
            )
        session.event("published", {"adapter": str(done.ref), "attached": attached, "digest": done.digest})
        if isinstance(spec, RefreshesDrafter) and spec.draft:
            self._refresh_drafter(done)
        if removed := self._parts.retention.after_publish(spec.adapter):
            session.event("log", {"message": f"removed by retention: {', '.join(removed)}"})
        return done.ref

    def _refresh_drafter(self, done: Manifest) -> None:
        """Queues the draft job that follows on this one, once."""
        claimed, session, spec, drafter = self._claim.job, self._claim.session, self._spec, self._parts.host.drafter
        if drafter is None or not isinstance(spec, SftJob | GrpoJob | OpdJob):
            session.event("log", {"message": f"the drafter is not refreshed: {_NO_DRAFTER}", "note": True})
            return
        following = refresh(spec, done.ref, drafter, metadata={"refreshes_for": claimed.id})
        job_id = self._claim.until_back(
            lambda: self._parts.consumer.submit(
                following,
                idempotency_key=f"draft-for-{claimed.id}",
                traceparent=claimed.traceparent,
                key_id=claimed.job.key_id or "",
            ),
            cancellable=False,
        )
        session.event("log", {"message": f"job {job_id} refreshes the drafter {drafter} for {done.ref}"})

    def _train(self, gates: Gates) -> Course[Manifest]:
        claimed, session = self._claim.job, self._claim.session
        if isinstance(self._spec, RefreshesDrafter) and self._spec.draft and self._parts.host.drafter is None:
            raise InvalidRequest(f"draft: {_NO_DRAFTER}", param="draft")
        self.check()
        with self._claim.trace.part("prepare"):
            parents = self.parents()
            warnings = gates.begin([one.version for one in parents])
            run = self.prepared(parents)
        learning = LearningCheck(self._spec)
        notes = Notes(session, run)
        notes.tell(*self.notes(run, parents), *warnings)
        notes.record({})
        start = 0
        checkpoint = None
        fence = int(claimed.fence)
        try:
            checkpoint = self._claim.until_back(
                lambda: self._parts.checkpoints.newest(claimed.id, claimed.spec_sha, fence)
            )
        except NewerSchema as error:
            session.event("log", {"message": f"checkpoint refused, starting over: {error.message}"})
        if checkpoint is not None:
            try:
                learning.restore(checkpoint.state)
                start = run.load_state(checkpoint.state)
                session.event("log", {"message": f"resumed after step {start} of {run.total_steps}"})
            except InvalidRequest as error:
                self._log.warning("checkpoint.refused", job=claimed.id, error=error.message)
                session.event("log", {"message": f"checkpoint refused, starting over: {error.message}"})
                run = self.prepared(parents)
                learning, checkpoint = LearningCheck(self._spec), None
        if before := learning.acceptance.begin(run, self._claim.pauses()):
            session.event("eval", {"step": 0, **before})

        def saved(step: int, where: str) -> None:
            session.event("checkpoint", {"step": step, "where": where})
            if where == "s3" and step > start:
                session.kept()
            self._claim.trace.span.event("checkpoint", {"temper.job.step": step, "where": where})

        writer = CheckpointWriter(
            self._parts.checkpoints,
            claimed.id,
            claimed.spec_sha,
            allowed=lambda: not session.lost,
            saved=saved,
            stamp=learning.stamp,
            fence=fence,
        )
        try:
            base_model, versions = self._parts.settings.served_model_name, [one.version for one in parents]
            kept = EpochVersions(self._claim, self._spec, self._parts.publisher, gates, versions, base_model)
            metrics = yield from self._steps(run, writer, start, checkpoint, learning, kept)
            notes.tell(learning.note(run, metrics), *run.outcome)
            notes.record(metrics)
            metrics |= learning.acceptance.check(
                run, metrics if start < run.total_steps else None, self._claim.pauses()
            )
            files = run.files(base_model)
            evidence = self._decided(gates, run, files, writer, notes, metrics) if gates.asked else ()
            with self._claim.trace.part("publish"):
                return self._publish(run, files, writer, gates, parents, metrics, evidence)
        finally:
            run.close()
            writer.close()

    def _steps(
        self,
        run: JobRun,
        writer: CheckpointWriter,
        start: int,
        checkpoint: Checkpoint | None,
        learning: LearningCheck,
        kept: EpochVersions,
    ) -> Course[dict[str, float]]:
        """Runs the remaining steps; returns the newest metrics. What has been done when it is to end is kept, in a
        checkpoint. Raises JobLost, JobCancelled, Draining, PASSING.

        Args:
            start: first step, which the checkpoint says.
        """
        session, total = self._claim.session, run.total_steps
        metrics = {} if checkpoint is None else self._metrics_at(checkpoint)
        seconds: float | None = None
        done = start
        to_publish = kept.steps(run)
        if checkpoint is not None and checkpoint.state.under_way:  # which began behind it
            to_publish -= {start}
        beginning = JobProgress(step=start, total_steps=total)
        self._claim.report(beginning, {})
        pauses = self._claim.pauses()
        try:
            yield from learning.begin(run, pauses)
            for index in range(start, total):
                session.check()
                if index in to_publish:
                    kept.publish(run, index, metrics)
                began = time.monotonic()
                with self._claim.trace.step(index, total):
                    newest = yield from steps_of(run, index, pauses)
                took = time.monotonic() - began
                done = index + 1
                seconds = took if seconds is None else (1 - _ETA_WEIGHT) * seconds + _ETA_WEIGHT * took
                self._claim.metrics.step_seconds.observe(took)
                metrics |= newest
                learning.saw(newest)
                progress = JobProgress(step=done, total_steps=total, eta_seconds=round(seconds * (total - done), 3))
                self._claim.report(progress, newest, step_seconds=round(took, 6))
                evaluation = {name: value for name, value in newest.items() if name.startswith("eval_")}
                if evaluation:
                    session.event("eval", {"step": done, **evaluation})
                if done % self._spec.checkpoint_every == 0 and done < total:
                    writer.submit(_checkpoint(run, done, metrics))
            metrics |= yield from learning.end(run, metrics, pauses)
        except (Draining, *PASSING):
            writer.submit(_checkpoint(run, done, metrics))
            writer.flush(self._remaining())
            raise
        return metrics

    def _metrics_at(self, checkpoint: Checkpoint) -> dict[str, float]:
        """Newest metrics of each name behind the checkpoint's step; one of an earlier release leaves them to the job's
        record."""
        found = checkpoint.state.data.get(_METRICS)
        if found is None:
            return dict(self._claim.job.job.metrics) if checkpoint.step else {}
        return {str(name): float(value) for name, value in found.items()}

    def _decided(
        self,
        gates: Gates,
        run: JobRun,
        files: Mapping[str, bytes],
        writer: CheckpointWriter,
        notes: Notes,
        metrics: Mapping[str, float],
    ) -> tuple[GateEvidence, ...]:
        """Has the gates decide on the result. Raises NotPublished, and what Gates.decide raises."""
        total, lora = run.total_steps, run.lora
        if lora is None:
            raise InvalidRequest("suites are answered by adapters: a drafter has no gates on them", param=PUBLISH)
        writer.submit(_checkpoint(run, total, metrics))  # a later attempt goes on with the answers to these weights
        digest = digest_of(files)
        notes.evaluation = gates.evaluation(digest)
        notes.record(metrics)
        try:
            with self._claim.trace.part("evaluate"):
                evidence = gates.decide(lora, digest, total)
        except Draining:
            writer.flush(self._remaining())
            raise
        notes.tell(*(gate.summary for gate in evidence))
        notes.record(metrics)
        for gate in evidence:
            if gate.gate == PUBLISH and not gate.passed:
                raise NotPublished(
                    f"{NOT_PUBLISHED}{gate.summary}; {self._spec.adapter} stays as it was, and evaluation "
                    f"{gate.evaluation} has every answer",
                    param=PUBLISH,
                )
        return evidence

    def _publish(
        self,
        run: JobRun,
        files: Mapping[str, bytes],
        writer: CheckpointWriter,
        gates: Gates,
        parents: Sequence[ParentVersion],
        metrics: Mapping[str, float],
        evidence: Sequence[GateEvidence],
    ) -> Manifest:
        claimed, session = self._claim.job, self._claim.session
        lineage = run.lineage
        parent = parents[0].version if parents and lineage is None else None
        total = run.total_steps

        def publish() -> Manifest:
            gates.keep_hashes([one.version for one in parents], cancellable=False)
            return self._parts.publisher.publish(
                self._spec.adapter,
                claimed.id,
                files,
                parent=parent,
                lineage=lineage,
                metrics=metrics,
                gates=evidence,
                dataset=self._spec.learnt if isinstance(self._spec, OfDataset) else None,
                current=becomes_current(self._spec),
                receipt=lambda manifest: receipt_of(
                    manifest,
                    self._spec,
                    run,
                    parents,
                    attempt=claimed.attempt,
                    model=self._parts.settings.served_model_name,
                    device=self._parts.host.model.device,
                ),
                fence=session.fence,
            )

        try:
            if not self._claim.until_back(lambda: self._parts.consumer.publishing(claimed)):
                raise JobCancelled
            return self._claim.until_back(
                publish,
                # The work is done: keep it on disk, should this process end before the stores are back.
                away=lambda: writer.submit(_checkpoint(run, total, metrics)),
                cancellable=False,
            )
        except Draining:
            writer.submit(_checkpoint(run, total, metrics))
            writer.flush(self._remaining())
            raise

    def _remaining(self) -> float:
        """Seconds that a checkpoint may still take, once the process drains."""
        left = self._parts.deadline() - time.monotonic()
        return max(0.5, min(left, self._parts.settings.trainer_drain_seconds) - 1.0)


def _checkpoint(run: JobRun, step: int, metrics: Mapping[str, float]) -> Checkpoint:
    """A run as it is, with the newest metrics of its job."""
    state = run.state()
    return Checkpoint(step, dataclasses.replace(state, data={**state.data, _METRICS: finite(metrics)}))
