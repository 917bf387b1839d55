"""/v1/request_log: requests with their answers, where the gateways log them (TEMPER_REQUEST_LOG).

A request belongs to the API key that sent it, which alone sees and erases it, beside administrators. It can be found a
few seconds after it ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Path, Query

from services.common.errors import NotFound
from services.gateway.api.base.routing import Routes, provided
from services.gateway.api.learning.erasure import Erasure
from services.gateway.auth.caller import owner, sees
from services.gateway.auth.route_permissions import ADMIN, INFERENCE, TRAIN, Permission
from services.gateway.core.file_store import StoreThreads
from services.gateway.protocol.learning.request_log import (
    DeletedLoggedRequest,
    DeletedLoggedRequests,
    LoggedRequestList,
    LoggedRequestObject,
)
from services.gateway.settings import GatewaySettings
from services.learning.request_log.index import RequestIndex, answer_mark, user_mark
from services.learning.request_log.log import RequestFilter, RequestLog

routes = Routes("request log")
_SCOPES = INFERENCE | TRAIN | ADMIN
_NO_LIMIT = float(2**53)
AnswerPath = Annotated[str, Path(max_length=256, description="Id of a completion, of a choice or of a response.")]
Name = Annotated[str | None, Query(min_length=1, max_length=256)]
Seconds = Annotated[float, Query(ge=0, le=_NO_LIMIT, description="Unix seconds.")]


@dataclass(frozen=True, slots=True)
class RequestLogServices:
    """The log, which blocks, and so is called in ``threads``; and the erasure of what is made of it."""

    log: RequestLog
    erasure: Erasure
    threads: StoreThreads


def open_index(settings: GatewaySettings) -> RequestIndex:
    """The index that the settings name."""
    return RequestIndex(settings, keep_seconds=settings.request_log_ttl_seconds)


Services = Annotated[RequestLogServices, provided(RequestLogServices)]


def _mine() -> str | None:
    """Owner of the requests that the caller may see; None: everybody."""
    return None if sees(None) else owner()


@routes.get("/v1/request_log", Permission(_SCOPES))
async def list_logged_requests(
    services: Services,
    user: Name = None,
    session: Name = None,
    since: Seconds = 0.0,
    until: Seconds = _NO_LIMIT,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: Annotated[str | None, Query(max_length=256)] = None,
) -> LoggedRequestList:
    """Logged requests that ended between two times, newest first. `after` is the last id of the page before."""
    wanted = RequestFilter(_mine(), user, session, since, until)
    found = await services.threads.run(services.log.newest, wanted, limit=limit + 1, after=after)
    return LoggedRequestList(data=[LoggedRequestObject.of(one) for one in found[:limit]], has_more=len(found) > limit)


@routes.get("/v1/request_log/{answer_id}", Permission(_SCOPES))
async def get_logged_request(answer_id: AnswerPath, services: Services) -> LoggedRequestObject:
    """The request that has this answer."""
    found = await services.threads.run(services.log.get, answer_id)
    if not sees(found.owner):
        raise _missing(answer_id)
    return LoggedRequestObject.of(found)


@routes.delete("/v1/request_log/{answer_id}", Permission(_SCOPES, audited=True))
async def erase_logged_request(answer_id: AnswerPath, services: Services) -> DeletedLoggedRequest:
    """Erases one request, also from the data sets that have it and the unfinished jobs that learn from those."""
    found = await services.threads.run(services.log.get, answer_id)
    if not sees(found.owner):
        raise _missing(answer_id)
    await services.threads.run(services.log.erase, found.id, RequestFilter(_mine()))
    erased = await services.erasure.erase(answer_mark(found.id))
    return DeletedLoggedRequest(id=answer_id, jobs=erased.jobs)


@routes.delete("/v1/request_log", Permission(_SCOPES, audited=True))
async def erase_logged_user(
    services: Services, user: Annotated[str, Query(min_length=1, max_length=256)]
) -> DeletedLoggedRequests:
    """Erases all requests of a user, also those that some gateway is still to write, and the rows of data sets that
    come from them; unfinished jobs that have such rows are cancelled. `DELETE /v1/users/{user}` erases what the user
    said, too."""
    deleted = await services.threads.run(services.log.erase_user, user, _mine())
    erased = await services.erasure.erase(user_mark(user, _mine()))
    return DeletedLoggedRequests(deleted=deleted, jobs=erased.jobs)


def _missing(answer_id: str) -> NotFound:
    return NotFound(f"no logged request has the answer {answer_id[:80]!r}", param="id")
