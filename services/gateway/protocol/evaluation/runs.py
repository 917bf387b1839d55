"""Bodies of /v1/evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from services.common.adapters.evidence import GateEvidence
from services.common.evaluation.runs.records import (
    Imported,
    ItemResult,
    PairResult,
    RunRecord,
    RunResult,
    RunSuite,
    RunTarget,
    Summary,
)
from services.common.jobs import EvalJob, Job, JobProgress, JobState
from services.gateway.protocol.fields.listing import Listing

_KIND: str = EvalJob.model_fields["kind"].default


class EvaluationObject(BaseModel):
    """A run of suites on targets: a job of kind eval by the same id, or the run that decides a training job's gates."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["evaluation"] = "evaluation"
    state: JobState
    reason: str | None
    """Reason why it failed or was cancelled."""
    progress: JobProgress | None
    """Items answered; null: the job is forgotten, or is a training job, whose metrics have them."""
    suites: list[RunSuite] | None
    """null: it has not begun."""
    targets: list[RunTarget] | None
    seed: int | None
    metadata: dict[str, str]
    summaries: list[Summary] | None
    """Scores of each target on each suite; null: there is no result yet."""
    comparisons: list[PairResult] | None
    """All pairs of targets on each suite."""
    job: str | None
    """Id of the training job whose gates it decides."""
    gates: list[GateEvidence]
    """Decisions of these gates, once they are made."""
    imported: Imported | None
    """Origin of imported results, whose suites are another program's tasks, `scorer` its metric, and of whose answers
    lengths and finish reasons are not known; null: it was run here."""
    created_at: float
    """Unix seconds, like every time here."""
    finished_at: float | None

    @classmethod
    def of(
        cls,
        run: str,
        job: Job | None,
        record: RunRecord | None,
        result: RunResult | None,
        gates: Sequence[GateEvidence] = (),
    ) -> EvaluationObject:
        """A run as the API tells it, of which the job or the record is there."""
        if record is not None and record.job is not None and job is not None and result is not None:
            job = None  # the run has ended, whatever becomes of the training job
        state = job.state if job is not None else JobState.FAILED if result is None else JobState.SUCCEEDED
        began = 0.0 if record is None else record.created_at
        return cls(
            id=run,
            state=state,
            reason=None if job is None else job.reason,
            progress=None if job is None or job.kind != _KIND else job.progress,
            suites=None if record is None else list(record.suites),
            targets=None if record is None else list(record.targets),
            seed=None if record is None else record.seed,
            metadata=job.metadata if job is not None else record.metadata if record is not None else {},
            summaries=None if result is None else list(result.summaries),
            comparisons=None if result is None else list(result.comparisons),
            job=None if record is None else record.job,
            gates=list(gates),
            imported=None if record is None else record.imported,
            created_at=began if job is None else job.created_at,
            finished_at=result.finished_at if result is not None else None if job is None else job.finished_at,
        )


class EvaluationList(Listing):
    """Runs, newest first."""

    object: Literal["list"] = "list"
    data: list[EvaluationObject]
    has_more: bool


class EvaluationItems(BaseModel):
    """A page of the items of one suite with the answers of one target, in the order of the suite."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    object: Literal["list"] = "list"
    suite: str
    target: str
    data: list[ItemResult]
    total: int
    """All items of the suite."""
    has_more: bool
    """Whether more items have been answered."""
