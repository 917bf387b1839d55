"""Bodies of /v1/feedback."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field

from services.gateway.protocol.fields.listing import Listing
from services.learning.feedback.record import ID_PATTERN, FeedbackRecord, Source

FeedbackPath = Annotated[str, Path(pattern=ID_PATTERN)]


class FeedbackObject(BaseModel):
    """What somebody said of an answer."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str = Field(pattern=ID_PATTERN)
    object: Literal["feedback"] = "feedback"
    completion_id: str | None
    response_id: str | None
    message_id: str | None
    session_id: str | None
    completion_ids: list[str] | None
    score: float | None
    thumb: Literal["up", "down"] | None
    label: str | None
    correction: str | None
    preferred_over: str | None
    comment: str | None
    source: Source
    user: str | None
    metadata: dict[str, str] | None
    created_at: float
    """Unix seconds."""
    changed_at: float
    used_by: list[str]
    """Data sets ("name@version") that have it: it does not change any more."""

    @classmethod
    def of(cls, record: FeedbackRecord) -> FeedbackObject:
        """Feedback as the API tells it."""
        return cls(
            **dict(record.said),
            id=record.id,
            created_at=record.created_at,
            changed_at=record.changed_at,
            used_by=list(record.used_by),
        )


class FeedbackList(Listing):
    """A page of feedback, newest first."""

    object: Literal["list"] = "list"
    data: list[FeedbackObject]
    has_more: bool


class DeletedFeedback(BaseModel):
    """What was removed."""

    id: str
    object: Literal["feedback"] = "feedback"
    deleted: Literal[True] = True


class DeletedFeedbackList(BaseModel):
    """How much was removed."""

    object: Literal["feedback.deletion"] = "feedback.deletion"
    deleted: int
