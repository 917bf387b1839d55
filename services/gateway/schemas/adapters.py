"""Bodies of /v1/adapters."""

from __future__ import annotations

from pydantic import Field

from services.gateway.schemas.base import RequestModel


class VersionRequest(RequestModel):
    """POST /v1/adapters/{name}/attach and /detach. The body may be left out."""

    version: int | None = Field(None, ge=1, lt=2**53)
    """attach: the version to attach, default the current one. detach: only if this version is attached."""
