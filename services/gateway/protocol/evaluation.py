"""Bodies of /v1/eval and /v1/evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field

from services.common.adapters.evidence import GateEvidence
from services.common.adapters.names import AdapterVersion
from services.common.evaluation.contamination.report import Contamination
from services.common.evaluation.gates.plan import DISCORDANT
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
from services.common.evaluation.statistics.power import smallest_gain
from services.common.evaluation.suites.manifest import SuiteManifest, SuiteOrigin
from services.common.evaluation.suites.names import REF_SCHEMA, SuiteName
from services.common.evaluation.suites.spec import SuiteItem, SuiteSettings
from services.common.evaluation.suites.split import TrainingSplit
from services.common.jobs import EvalJob, Job, JobProgress, JobState

_KIND: str = EvalJob.model_fields["kind"].default
SuitePath = Annotated[str, Path(json_schema_extra=dict(REF_SCHEMA))]
""""name" or "name@n" in a path; what is wrong with it is said by parse_suite_ref."""


class SuiteRequest(SuiteSettings):
    """POST /v1/eval/suites: a new version of a suite, out of lines of JSON."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    name: SuiteName
    jsonl: str = Field(min_length=1)
    """The items, a JSON object a line: `prompt` or `messages`, `expected` (the right answer, or several), and where
    they apply `choices`, `expected_tool_calls`, `json_schema`, `id`, `group`, `weight`, `tools`, `metadata`. With
    `split`, the rows of a training file, as jobs of kind sft learn from."""
    split: TrainingSplit | None = None
    """Takes a part of a training file as the suite, whole groups at a time. The items' ids name the lines."""

    @property
    def settings(self) -> SuiteSettings:
        """What the request says of all items."""
        return SuiteSettings(**{field: getattr(self, field) for field in SuiteSettings.model_fields})


class SuiteObject(BaseModel):
    """A version of a suite, which never changes."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    """"name@version"."""
    object: Literal["eval.suite"] = "eval.suite"
    name: str
    version: int
    digest: str
    """SHA-256 over settings and items: equal suites have equal digests."""
    settings: SuiteSettings
    items: int
    clusters: int
    """Groups, and items without one."""
    effective_items: float
    """Independent items of equal weight that the suite is worth at least, by its weights and groups."""
    smallest_gain: float | None
    """Smallest gain in accuracy that a comparison on this suite finds with power 0.8 at alpha 0.05, were a fifth of its
    items answered differently; null: none."""
    origin: SuiteOrigin | None
    """Training file that it was taken from."""
    created_at: float
    """Unix seconds."""

    @classmethod
    def of(cls, manifest: SuiteManifest) -> SuiteObject:
        """A version as the API tells it."""
        gain = smallest_gain(manifest.effective_items, DISCORDANT)
        return cls(
            id=str(manifest.ref),
            name=manifest.name,
            version=manifest.version,
            digest=manifest.digest,
            settings=manifest.settings,
            items=manifest.items,
            clusters=manifest.clusters,
            effective_items=manifest.effective_items,
            smallest_gain=None if gain is None else round(gain, 4),
            origin=manifest.origin,
            created_at=manifest.created_at,
        )


class SuiteList(BaseModel):
    """Versions of suites."""

    object: Literal["list"] = "list"
    data: list[SuiteObject]
    has_more: bool


class SuiteItemObject(SuiteItem):
    """An item of a suite."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    index: int
    """Place in the suite, from 0."""


class SuiteItemList(BaseModel):
    """A page of a suite's items, in their order."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    object: Literal["list"] = "list"
    suite: str
    """"name@version"."""
    data: list[SuiteItemObject]
    total: int
    """All items of the version."""
    has_more: bool


class DeletedSuite(BaseModel):
    """What was removed."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    """As it was asked for."""
    object: Literal["eval.suite"] = "eval.suite"
    deleted: Literal[True] = True
    versions: list[int]


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


class EvaluationList(BaseModel):
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


class ContaminatedItemObject(BaseModel):
    """An item that occurs in training data."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    index: int
    """Place in the suite, from 0."""
    id: str
    exact: bool
    """Its whole prompt was trained on."""
    share: float
    """Share of its runs of 13 words that occur in the training data; 0 if it is shorter."""


class ContaminationObject(BaseModel):
    """What of a suite a version was trained on, with all that it came of."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    object: Literal["eval.contamination"] = "eval.contamination"
    suite: str
    """"name@version"."""
    adapter: str
    """"name@version"."""
    items: int
    contaminated: int
    """Items of which something occurs in the training data."""
    exact: int
    """Those whose whole prompt does."""
    jobs: int
    """Jobs whose training data were compared."""
    unknown: list[str]
    """Versions and jobs of the lineage of whose training data nothing is known: versions that were uploaded, came of a
    session or of an earlier release, and jobs whose adapter was deleted."""
    data: list[ContaminatedItemObject]
    """The first of the contaminated items, as many as asked for."""

    @classmethod
    def of(cls, suite: SuiteManifest, version: AdapterVersion, found: Contamination, limit: int) -> ContaminationObject:
        """A comparison as the API tells it."""
        return cls(
            suite=str(suite.ref),
            adapter=str(version),
            items=found.items,
            contaminated=len(found.contaminated),
            exact=found.exact,
            jobs=found.jobs,
            unknown=list(found.unknown),
            data=[
                ContaminatedItemObject(
                    index=one.index, id=one.id, exact=one.overlap.exact, share=round(one.overlap.share, 4)
                )
                for one in found.contaminated[:limit]
            ],
        )
