"""Bodies of /v1/files and /v1/batches."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from services.gateway.core.batch_queue import Batch, BatchSpec, Endpoint, LineError, Status
from services.gateway.core.file_store import FileInfo, Purpose
from services.gateway.protocol.fields.base import RequestModel
from services.gateway.protocol.fields.listing import Listing


class FileObject(BaseModel):
    """A file, as OpenAI shows it."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: str | None = None
    sha256: str
    """Lower-case hex digest of the content."""

    @classmethod
    def of(cls, info: FileInfo) -> FileObject:
        """File object of a stored file."""
        return cls(
            id=info.id,
            bytes=info.bytes,
            created_at=info.created_at,
            expires_at=info.expires_at,
            filename=info.filename,
            purpose=info.purpose,
            sha256=info.sha256,
        )


class FileList(Listing):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    """What DELETE answers."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


EXPIRY_SECONDS = (3600, 30 * 86_400)
"""Bounds of expires_after: as at OpenAI."""
MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
_WINDOW_SECONDS = 86_400


class ExpiresAfter(RequestModel):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=EXPIRY_SECONDS[0], le=EXPIRY_SECONDS[1])
    """After its creation: one hour to 30 days."""


class BatchRequest(RequestModel):
    """A file of requests, to be answered within a day."""

    input_file_id: str = Field(min_length=1, max_length=64)
    """Id of a file with the purpose "batch": a line is `{"custom_id", "method": "POST", "url", "body"}`."""
    endpoint: Endpoint
    """The `url` of every line."""
    completion_window: Literal["24h"]
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=16)
    output_expires_after: ExpiresAfter | None = None
    """Expiry of the files with the results; default: they stay."""

    def spec(self, owner: str) -> BatchSpec:
        """Batch as the queue takes it."""
        expires = self.output_expires_after
        return BatchSpec(
            owner=owner,
            input_file_id=self.input_file_id,
            endpoint=self.endpoint,
            window_seconds=_WINDOW_SECONDS,
            metadata=self.metadata,
            output_seconds=None if expires is None else expires.seconds,
        )


class BatchError(BaseModel):
    """Something wrong with the input file."""

    code: str
    line: int | None
    message: str
    param: str | None

    @classmethod
    def of(cls, error: LineError) -> BatchError:
        return cls(code=error.code, line=error.line, message=error.message, param=error.param)


class BatchErrors(BaseModel):
    """Why a batch failed: the first errors of its input file."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    """How many requests there are, and how many have a result of which kind."""

    total: int
    completed: int
    failed: int


class BatchObject(BaseModel):
    """A batch, as OpenAI shows it. Times are unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, batch: Batch) -> BatchObject:
        """Batch object of a batch."""
        ended = {batch.status: _whole(batch.finished_at)}
        errors = BatchErrors(data=[BatchError.of(error) for error in batch.errors]) if batch.errors else None
        return cls(
            id=batch.id,
            endpoint=cast(Endpoint, batch.spec.endpoint),  # Anthropic's batches are not shown in this form
            errors=errors,
            input_file_id=batch.spec.input_file_id,
            completion_window=_window(batch.spec.window_seconds),
            status=batch.status,
            output_file_id=batch.output_file_id,
            error_file_id=batch.error_file_id,
            created_at=int(batch.created_at),
            in_progress_at=_whole(batch.in_progress_at),
            expires_at=int(batch.expires_at),
            finalizing_at=_whole(batch.finalizing_at),
            completed_at=ended.get("completed"),
            failed_at=ended.get("failed"),
            expired_at=ended.get("expired"),
            cancelling_at=_whole(batch.cancelling_at),
            cancelled_at=ended.get("cancelled"),
            request_counts=RequestCounts(total=batch.total, completed=batch.completed, failed=batch.failed),
            metadata=batch.spec.metadata,
        )


class BatchList(Listing):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)


def _window(seconds: int) -> str:
    return f"{seconds // 3600}h" if seconds % 3600 == 0 else f"{seconds}s"
