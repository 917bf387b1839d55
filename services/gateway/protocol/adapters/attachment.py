"""Bodies of /v1/adapters."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from pydantic import Field

from services.common.adapters.names import NAME_SCHEMA
from services.gateway.protocol.fields.base import RequestModel

AdapterPath = Annotated[str, Path(json_schema_extra=dict(NAME_SCHEMA))]
"""An adapter's name in a path; what is wrong with it is said by check_adapter_name."""


class VersionRequest(RequestModel):
    """POST /v1/adapters/{name}/attach and /detach. The body may be left out."""

    version: int | None = Field(None, ge=1, lt=2**53)
    """attach: the version to attach, default the current one. detach: only if this version is attached."""
