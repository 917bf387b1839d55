"""What an attempt does before the first step, be it a job or a dry run of one: checks, parents, a run that is admitted,
and notes on all that for the job's user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.common.adapters.registry import AdapterRegistry
from services.common.errors import InvalidRequest
from services.common.evaluation.contamination.store import TrainingHashes
from services.common.jobs import JobBase, MergeJob, PublishingSpec
from services.common.jobs.dry_runs.guard_rails import warnings
from services.common.jobs.fields.dataset import OfDataset
from services.common.queue.consumer import JobConsumer
from services.trainer.evaluation.run import Evaluations
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.base import JobRun, Prepare
from services.trainer.memory.budget import MemoryTaken
from services.trainer.parent_versions import ParentVersion, ParentVersions, continued, sampled_elsewhere
from services.trainer.runtime.attempts.claim import Claim
from services.trainer.runtime.attempts.facts import facts_of
from services.trainer.runtime.checkpoint import CheckpointStore
from services.trainer.runtime.job_link import JobSession
from services.trainer.runtime.publish import Publisher, VersionRetention
from services.trainer.settings import TrainerSettings

S = TypeVar("S", bound=PublishingSpec)


class Notes:
    """Notes of an attempt, which go into the job's record together with its settings, and among its events."""

    def __init__(self, session: JobSession, run: JobRun) -> None:
        self._session = session
        self._settings = dict(run.settings)
        self._notes: list[str] = []
        self.evaluation = ""
        """Id of the evaluation by which the job's gates decide."""

    def tell(self, *notes: str | None) -> None:
        """Adds notes, each of which becomes an event at once; all go into the record when `record` is called."""
        for note in notes:
            if note is not None:
                self._notes.append(note)
                self._session.event("log", {"message": note, "note": True})

    def record(self, metrics: Mapping[str, float], report: str = "") -> None:
        """Writes the settings, all notes so far, the evaluation, these metrics and a dry run's report into the job's
        record."""
        self._session.describe(self._settings, self._notes, metrics, self.evaluation, report)


@dataclass(frozen=True, slots=True)
class Parts:
    """Dependencies of an attempt that all jobs of a trainer share."""

    host: PolicyHost
    settings: TrainerSettings
    registry: AdapterRegistry
    prepare: Prepare
    consumer: JobConsumer
    checkpoints: CheckpointStore
    publisher: Publisher
    parents: ParentVersions
    retention: VersionRetention
    training_hashes: TrainingHashes
    evaluations: Evaluations
    deadline: Callable[[], float]
    """Time at which a draining process has to end, of time.monotonic()."""


class Preparation(Generic[S]):
    """Beginning of an attempt, on the trainer's thread."""

    def __init__(self, parts: Parts, claim: Claim, spec: S) -> None:
        self._parts = parts
        self._claim = claim
        self._spec = spec

    def check(self) -> None:
        """Raises InvalidRequest if the job cannot make a version of its adapter, or came without its data."""
        self._parts.registry.check_new_name(self._spec.adapter)
        self._claim.until_back(lambda: self._parts.registry.check_kind(self._spec.adapter, self._spec.makes))
        if isinstance(self._spec, OfDataset) and self._spec.unread:
            raise InvalidRequest(
                "a job on a dataset must be submitted through the gateway, which reads its rows", param="dataset"
            )

    def parents(self) -> list[ParentVersion]:
        """Versions that the job starts from. Raises as ParentVersions.read."""
        return self._parts.parents.read(self._claim.job, self._spec, self._claim.until_back)

    def prepared(self, parents: Sequence[ParentVersion], spec: S | None = None) -> JobRun:
        """A run of the job, admitted beside the others that run here. Raises NotBeside, and what prepare raises.

        Args:
            spec: in the job's place.
        """
        job_id, budget = self._claim.job.id, self._parts.host.memory_budget
        budget.release_job(job_id)
        run = self._claim.until_back(lambda: self._attempted(self._spec if spec is None else spec, parents))
        budget.hold_job(job_id)
        self._claim.beside.admit(job_id, run)
        return run

    def _attempted(self, spec: S, parents: Sequence[ParentVersion]) -> JobRun:
        try:
            if isinstance(spec, MergeJob):
                return self._parts.prepare(spec, self._parts.host, None, parents)
            files = parents[0].files if parents else None
            return self._parts.prepare(spec, self._parts.host, files, (), self._claim.pauses())
        except MemoryTaken as error:
            if self._claim.beside.others():
                raise self._claim.beside.refused(error.message) from error
            raise

    def notes(self, run: JobRun, parents: Sequence[ParentVersion]) -> list[str | None]:
        """Notes on the data, on the guard rails and on what is continued."""
        guarded = warnings(facts_of(self._spec, run)) if isinstance(self._spec, JobBase) and not self._dry else []
        return [*run.notes, *guarded, continued(self._spec, parents), sampled_elsewhere(self._spec, parents)]

    @property
    def _dry(self) -> bool:
        """A dry run looks at the guard rails once it has measured."""
        return isinstance(self._spec, JobBase) and bool(self._spec.dry_run)
