"""Bodies of /v1/forge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from services.common.jobs import Job, JobProgress, JobState
from services.gateway.protocol.fields.listing import Listing


class ForgeObject(BaseModel):
    """A forge run; a job of kind forge by the same id."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["forge.run"] = "forge.run"
    state: JobState
    reason: str | None
    """Reason why it failed or was cancelled."""
    progress: JobProgress
    """Finished stages, of all."""
    model: str | None
    """Place of the smaller checkpoint, s3://…, for `temper up --model`; null: it is not there yet."""
    digest: str | None
    """Digest of its weights, as the engines tell theirs."""
    plan: dict[str, Any] | None
    """Parameters, bytes and widths before and after."""
    evaluation: dict[str, Any] | None
    """Suite → means with intervals before and after, and the comparison item by item; null: there were no suites."""
    metadata: dict[str, str]
    created_at: float
    """Unix seconds, like every time here."""
    finished_at: float | None

    @classmethod
    def of(cls, job: Job, place: str, record: Mapping[str, Any] | None) -> ForgeObject:
        """A run as the API tells it.

        Args:
            place: of its checkpoint.
            record: forge.json of the checkpoint; None: it is not there.
        """
        return cls(
            id=job.id,
            state=job.state,
            reason=job.reason,
            progress=job.progress,
            model=None if record is None else place,
            digest=None if record is None else record["outputs"]["digest"],
            plan=None if record is None else record["plan"],
            evaluation=None if record is None else record.get("evaluation"),
            metadata=job.metadata,
            created_at=job.created_at,
            finished_at=job.finished_at,
        )


class ForgeList(Listing):
    """Runs, newest first."""

    object: Literal["list"] = "list"
    data: list[ForgeObject]
    has_more: bool


class DeletedForge(BaseModel):
    """Checkpoint that was removed."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    """Of its run."""
    object: Literal["forge.run"] = "forge.run"
    deleted: Literal[True] = True
