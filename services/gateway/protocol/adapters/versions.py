"""Bodies of /v1/adapters/{name}/merge, /rollback and /prune."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from services.common.jobs import MergeSettings
from services.common.validation.json_rules import Rules, at_least_one
from services.gateway.protocol.fields.base import RequestModel


class MergeRequest(MergeSettings):
    """POST /v1/adapters/{name}/merge: a job that makes a new version of ``name``."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the entries that dare_* drop."""
    attach: bool = False
    """Attach the new version to the base model's name when the job succeeds."""
    metadata: dict[str, str] = Field(default_factory=dict)


class RollbackRequest(RequestModel):
    """POST /v1/adapters/{name}/rollback. The body may be left out."""

    version: int | None = Field(None, ge=1, lt=2**53)
    """The version to go back to; default: the newest one before the current one."""


class PruneRequest(RequestModel):
    """POST /v1/adapters/{name}/prune: what to keep. Both together keep what either keeps."""

    keep: int | None = Field(None, ge=1, lt=2**31)
    """Number of newest versions to keep."""
    days: float | None = Field(None, ge=0, le=1e6)
    """Versions that are younger than this."""
    dry_run: bool = False
    """Only say what would be removed."""

    json_rules: ClassVar[Rules] = (at_least_one("keep", "days"),)
