"""/v1/feedback: what users, judges and tests say of answers.

Feedback belongs to the API key that sent it, which alone sees, changes and removes it, beside administrators.
An id that no answer has is taken as well: the answer may be older than anything that is kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Query, Response
from fastapi.responses import StreamingResponse

from services.common.errors import InvalidRequest
from services.gateway.api.base.idempotency import Once, json_answer
from services.gateway.api.base.routing import Routes, provided
from services.gateway.api.base.unreadable import Unreadable
from services.gateway.auth.caller import owner, sees
from services.gateway.auth.route_permissions import ADMIN, INFERENCE, TRAIN, Permission
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.protocol.learning.feedback import (
    DeletedFeedback,
    DeletedFeedbackList,
    FeedbackList,
    FeedbackObject,
    FeedbackPath,
)
from services.gateway.settings import GatewaySettings
from services.learning.feedback.record import ID_PATTERN, Feedback, FeedbackRecord, Source
from services.learning.feedback.store import FeedbackFilter, FeedbackStore, missing

routes = Routes("feedback")
_SCOPES = INFERENCE | TRAIN | ADMIN


@dataclass(frozen=True, slots=True)
class FeedbackServices:
    """Store of feedback, and the series that count it."""

    store: FeedbackStore
    metrics: GatewayMetrics


def open_feedback(settings: GatewaySettings) -> FeedbackStore:
    """The store that the settings name."""
    return FeedbackStore(settings, max_bytes=settings.feedback_max_bytes, keep_seconds=settings.feedback_ttl_seconds)


Services = Annotated[FeedbackServices, provided(FeedbackServices)]


def _chosen(
    answer: Annotated[
        str | None,
        Query(max_length=256, description='Id of a completion, response or message, or "session:" and a session\'s.'),
    ] = None,
    user: Annotated[str | None, Query(max_length=256)] = None,
    source: Source | None = None,
    label: Annotated[str | None, Query(max_length=64)] = None,
) -> FeedbackFilter:
    """What of the caller's feedback is meant; an administrator means everybody's."""
    return FeedbackFilter(None if sees(None) else owner(), answer, user, source, label)


Chosen = Annotated[FeedbackFilter, Depends(_chosen)]


@routes.post(
    "/v1/feedback",
    Permission(_SCOPES, idempotent=True),
    status_code=201,
    response_model=FeedbackObject,
    responses={200: {"model": FeedbackObject, "description": "It replaced what was said before."}},
)
async def give_feedback(body: Feedback, feedback: Services, once: Once) -> Any:
    """Says something of an answer. A user and source has one opinion of an answer: what it says again replaces what it
    said before, unless a data set has used that."""

    async def give() -> Response:
        record, outcome = await feedback.store.add(owner(), body)
        feedback.metrics.feedback.labels(body.source).inc()
        return json_answer(FeedbackObject.of(record), 201 if outcome == "created" else 200)

    return await once(give, body=body)


@routes.get("/v1/feedback", Permission(_SCOPES))
async def list_feedback(
    feedback: Services,
    wanted: Chosen,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(pattern=ID_PATTERN)] = None,
) -> FeedbackList:
    """Feedback, newest first. `after` is the last id of the page before."""
    unreadable = Unreadable()
    found = await feedback.store.list(wanted, limit=limit + 1, after=after, pass_over=unreadable)
    data = [FeedbackObject.of(one) for one in found[:limit]]
    return FeedbackList(data=data, has_more=len(found) > limit, unreadable=unreadable)


@routes.get(
    "/v1/feedback/export",
    Permission(_SCOPES),
    response_class=Response,
    responses={200: {"content": {"application/x-jsonl": {"schema": {"type": "string"}}}}},
)
async def export_feedback(feedback: Services, wanted: Chosen) -> Response:
    """All of it as JSONL, newest first."""
    first = await feedback.store.list(wanted, limit=1)  # what is wrong is answered with a status

    async def lines() -> AsyncIterator[bytes]:
        if first:
            async for record in feedback.store.each(wanted):
                yield FeedbackObject.of(record).model_dump_json().encode() + b"\n"

    return StreamingResponse(lines(), media_type="application/x-jsonl")


@routes.get("/v1/feedback/{feedback_id}", Permission(_SCOPES))
async def get_feedback(feedback_id: FeedbackPath, feedback: Services) -> FeedbackObject:
    """One opinion."""
    return FeedbackObject.of(await _own(feedback, feedback_id))


@routes.put("/v1/feedback/{feedback_id}", Permission(_SCOPES))
async def replace_feedback(feedback_id: FeedbackPath, body: Feedback, feedback: Services) -> FeedbackObject:
    """Says something else of the same answer, for the same user, until a data set has used it."""
    return FeedbackObject.of(await feedback.store.replace(await _own(feedback, feedback_id), body))


@routes.delete("/v1/feedback/{feedback_id}", Permission(_SCOPES, audited=True))
async def delete_feedback(feedback_id: FeedbackPath, feedback: Services) -> DeletedFeedback:
    """Removes an opinion."""
    await _own(feedback, feedback_id)
    await feedback.store.delete([feedback_id])
    return DeletedFeedback(id=feedback_id)


@routes.delete("/v1/feedback", Permission(_SCOPES, audited=True))
async def delete_all_feedback(feedback: Services, wanted: Chosen) -> DeletedFeedbackList:
    """Removes all feedback of an answer or of a user, or what else is chosen: something has to be."""
    if (wanted.target, wanted.user, wanted.source, wanted.label) == (None,) * 4:
        raise InvalidRequest("say which feedback: answer, user, source or label", param="user")
    return DeletedFeedbackList(deleted=await feedback.store.delete_all(wanted))


async def _own(feedback: FeedbackServices, feedback_id: str) -> FeedbackRecord:
    """Raises NotFound: there is none, or it is another API key's."""
    found = await feedback.store.get(feedback_id)
    if not sees(found.owner):
        raise missing(feedback_id)
    return found
