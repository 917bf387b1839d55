"""A job as everybody sees it: its state, its progress, its events."""

from __future__ import annotations

import enum
from typing import Any, Literal

from pydantic import Field

from services.common.jobs.dry_runs.report import DryRunReport
from services.common.jobs.fine_tuning import FineTuning
from services.common.jobs.registry import KINDS
from services.common.validation.strict_models import StrictModel, absent

NOT_PUBLISHED = "not published: "
"""Beginning of the reason of a job that has trained, and whose result did not fulfil its `publish_if`."""


def _no(value: object) -> bool:
    return value is False


def checkpoints_of(job_id: str) -> str:
    """Prefix of a job's checkpoints in the object store."""
    return f"jobs/{job_id}/checkpoints/"


class JobState(enum.StrEnum):
    """State of a job. Terminal states never change again."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class JobProgress(StrictModel):
    """Progress of a running job."""

    step: int = 0
    total_steps: int = 0
    eta_seconds: float | None = None


class Job(StrictModel):
    """A job as everybody sees it (HTTP, CLI, Redis hash)."""

    id: str
    kind: str = Field(json_schema_extra={"enum": [*KINDS]})
    adapter: str
    state: JobState
    created_at: float
    """Unix seconds, like every time here."""
    started_at: float | None = None
    finished_at: float | None = None
    attempts: int = 0
    reason: str | None = None
    """Reason why it failed or was cancelled, in words for the user."""
    progress: JobProgress = JobProgress()
    cancel_requested: bool = False
    metrics: dict[str, float] = Field(default_factory=dict)
    """The newest of each metric."""
    result_adapter: str | None = None
    """"name@n" that the job published."""
    parent: str | None = None
    """"name@n" that it continues; of a merge all sources, with commas. null: a new adapter, or not begun yet."""
    settings: dict[str, int | float] = Field(default_factory=dict)
    """Settings that it trains with, named by the job or left open: learning_rate, steps, epochs, …"""
    notes: list[str] = Field(default_factory=list)
    """Notes for the user: on the data, on the version that is continued, and on examples that were hardly learnt."""
    evaluation: str | None = None
    """Id of the evaluation by which its gates decided; null: it has none, or has not come so far."""
    metadata: dict[str, str] = Field(default_factory=dict)
    dataset: str | None = None
    """"name@n" that it learns from; null: it has data of its own."""
    dataset_digest: str | None = None
    """Digest of the data set as it was then."""
    paused: bool = False
    """It is paused: queued, but no engine takes it until it is resumed. Running still: it stops at its next step."""
    fine_tuning: FineTuning | None = Field(None, exclude_if=absent)
    """What it was asked for as, over OpenAI's API of fine-tuning jobs."""
    dry_run: bool = Field(False, exclude_if=_no)
    """It only finds out what it would do."""
    report: DryRunReport | None = Field(None, exclude_if=absent)
    """What a dry run found out, once it has ended."""
    key_id: str | None = None
    """Id of the API key that submitted it; null: there were no keys."""


class JobEvent(StrictModel):
    """One entry of a job's replayable event stream. ``id`` is the Redis stream id (SSE Last-Event-ID)."""

    id: str
    kind: Literal["state", "progress", "checkpoint", "eval", "published", "log"]
    time: float
    data: dict[str, Any]
