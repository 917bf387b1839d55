"""Bodies of /v1/request_log."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from services.gateway.protocol.learning.erasure import ErasedJobs
from services.learning.request_log.record import LoggedRequest


class LoggedRequestObject(LoggedRequest):
    """A logged request."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    object: Literal["logged_request"] = "logged_request"

    @classmethod
    def of(cls, record: LoggedRequest) -> LoggedRequestObject:
        """A record as the API tells it."""
        return cls(**dict(record))


class LoggedRequestList(BaseModel):
    """A page of logged requests, newest first."""

    object: Literal["list"] = "list"
    data: list[LoggedRequestObject]
    has_more: bool


class DeletedLoggedRequest(BaseModel):
    """What was removed."""

    id: str
    object: Literal["logged_request"] = "logged_request"
    deleted: Literal[True] = True
    jobs: ErasedJobs


class DeletedLoggedRequests(BaseModel):
    """How much was removed."""

    object: Literal["logged_request.deletion"] = "logged_request.deletion"
    deleted: int
    jobs: ErasedJobs
