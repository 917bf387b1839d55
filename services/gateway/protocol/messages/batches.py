"""/v1/messages/batches: Anthropic's form of batches."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import to_json

from services.common.validation.errors import contradiction
from services.gateway.core.batch_queue import MESSAGES, Batch
from services.gateway.protocol.fields.base import RequestModel, unsupported
from services.gateway.protocol.fields.listing import Listing

MAX_REQUESTS = 100_000
"""Anthropic's; the gateway's own limit is a setting."""


def _in_one_piece(params: dict[str, Any]) -> dict[str, Any]:
    if params.get("stream") not in (None, False):
        raise unsupported("stream is not supported in a batch: results are read when it has ended", "stream")
    return params


# What else it says is checked when the request runs: then it is the result of this request, and not of the batch.
Params = Annotated[
    dict[str, Any],
    AfterValidator(_in_one_piece),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {"stream": {"enum": [False, None]}},
            "description": "The body of POST /v1/messages. What is wrong with it is the result of this request.",
        }
    ),
]


class MessageRequest(RequestModel):
    """One message of a batch."""

    custom_id: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    """Name of this request only: results are found by it."""
    params: Params


class MessageBatchRequest(RequestModel):
    """Messages that are answered within a day."""

    # fail_fast: one error is told, and the errors of many requests would fill the memory.
    requests: Annotated[list[MessageRequest], Field(min_length=1, max_length=MAX_REQUESTS, fail_fast=True)]

    @model_validator(mode="after")
    def _told_apart(self) -> MessageBatchRequest:
        seen: dict[str, int] = {}
        for number, request in enumerate(self.requests):
            first = seen.setdefault(request.custom_id, number)
            if first != number:
                raise contradiction(
                    f"two requests have the custom_id {request.custom_id!r}, [{first}] and [{number}]: each needs one "
                    "of its own",
                    f"requests[{number}].custom_id",
                )
        return self

    def lines(self) -> Iterator[bytes]:
        """The input file of the batch."""
        for request in self.requests:
            line = {"custom_id": request.custom_id, "method": "POST", "url": MESSAGES, "body": request.params}
            # NaN is left to the request itself, which names the field.
            yield to_json(line, inf_nan_mode="constants") + b"\n"


class _Answer(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class MessageBatchCounts(_Answer):
    """How many requests have a result of which type; until the batch has ended, all are processing."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0

    @classmethod
    def of(cls, batch: Batch) -> MessageBatchCounts:
        """Counts of a batch; their sum is always the number of its requests."""
        total = batch.spec.requests or batch.total
        if not batch.ended:
            return cls(processing=total)
        counts = cls()
        if batch.output_file_id is not None:
            counts = cls(
                succeeded=batch.completed, errored=batch.failed, canceled=batch.canceled, expired=batch.expired
            )
        rest = total - counts.succeeded - counts.errored - counts.canceled - counts.expired
        field = {"cancelled": "canceled", "expired": "expired"}.get(batch.status, "errored")
        return counts.model_copy(update={field: getattr(counts, field) + rest})


class MessageBatch(_Answer):
    """A batch of messages, as Anthropic shows it."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: datetime
    expires_at: datetime
    """When what has not run by then does not run any more."""
    ended_at: datetime | None
    cancel_initiated_at: datetime | None
    archived_at: None = None
    """Always null: the results are there as long as the batch is, which is 30 days from its end."""
    results_url: str | None
    """Where the results are, once the batch has ended."""

    @classmethod
    def of(cls, batch: Batch, results_url: str) -> MessageBatch:
        """Message batch object of a batch."""
        status = "ended" if batch.ended else "canceling" if batch.cancelling else "in_progress"
        # One that had not begun ended with its cancellation.
        cancelled_at = batch.cancelling_at or (batch.finished_at if batch.status == "cancelled" else None)
        return cls(
            id=batch.id,
            processing_status=cast(Literal["in_progress", "canceling", "ended"], status),
            request_counts=MessageBatchCounts.of(batch),
            created_at=_time(batch.created_at),
            expires_at=_time(batch.expires_at),
            ended_at=None if batch.finished_at is None else _time(batch.finished_at),
            cancel_initiated_at=None if cancelled_at is None else _time(cancelled_at),
            results_url=results_url if batch.ended else None,
        )


class MessageBatchList(_Answer, Listing):
    """A page of batches, newest first."""

    data: list[MessageBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    """There are more behind the page; of one that was asked for with before_id: before it."""


class DeletedMessageBatch(_Answer):
    """What DELETE answers."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
