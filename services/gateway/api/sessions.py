"""/v1/sessions: what engines keep of conversations, to be looked at, saved, carried elsewhere and deleted."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException

from services.common.errors import InvalidRequest, NotFound, TemperError
from services.common.pb import engine_pb2
from services.common.security.api_keys import KEY_ID_PATTERN
from services.gateway.api.base.routing import Inference, Routes, provided
from services.gateway.auth.caller import owner
from services.gateway.auth.route_permissions import ADMIN, INFERENCE, Permission
from services.gateway.core.errors import response_of
from services.gateway.engines.calls.conversation_sessions import ConversationSessionRouter
from services.gateway.inference.engine_request import session_of
from services.gateway.protocol.sessions import DeletedSession, SessionList, SessionObject, SessionPath

routes = Routes("sessions")
Sessions = Annotated[ConversationSessionRouter, provided(ConversationSessionRouter)]
"""Router to the engines that keep clients' sessions."""

_ROUTE = "/v1/sessions/{session_id:path}"
_CLOSE = {"connection": "close"}
"""Header of the answer that refuses an import. Without it, the rest of the file would be read to find the next
request."""
_FILE = {"schema": {"type": "string", "format": "binary"}}


@routes.get("/v1/sessions", Permission(INFERENCE))
async def list_sessions(
    sessions: Sessions,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(max_length=256, description="The last id of the page before.")] = None,
) -> SessionList:
    """The caller's sessions of all engines, last used first."""
    found = await sessions.all_of(owner())
    if after is not None:
        names = [kept.history.session.name for kept in found]
        if after not in names:
            raise NotFound(f"no such session: {after[:80]!r}", param="after")
        found = found[names.index(after) + 1 :]
    data = [SessionObject.of(kept.history, kept.client.id) for kept in found[:limit]]
    return SessionList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(found) > limit,
    )


# These routes come before that of a session, whose path would match theirs.


@routes.get(
    f"{_ROUTE}/export",
    Permission(INFERENCE),
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": _FILE}}},
)
async def export_session(session_id: SessionPath, sessions: Sessions) -> Response:
    """A session as one file: its tokens, and what the model has computed of them. Another Temper of the same model
    reads it with `import`."""
    pieces = await sessions.export(session_of(session_id))
    headers = {
        "content-disposition": f"attachment; filename*=UTF-8''{quote(session_id, safe='')}.session",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


@routes.put(
    f"{_ROUTE}/import",
    Permission(ADMIN, audited=True, streams=True),
    responses={200: {"model": SessionObject}},
    response_class=Response,
    openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": _FILE}}},
)
async def import_session(
    request: Request,
    session_id: SessionPath,
    sessions: Sessions,
    inference: Inference,
    key_id: Annotated[
        str | None,
        Query(pattern=KEY_ID_PATTERN, description="Id of the API key whose session it becomes; default: the caller's."),
    ] = None,
) -> Response:
    """Reads an exported file. The session is then as it was when it was exported, and the next request of it goes on
    from there. What is in the file is believed: take files only from where you would take a model from."""
    session = session_of(session_id)
    if key_id is not None:
        if not inference.settings.api_keys_file:
            raise InvalidRequest("this gateway has no API keys: leave key_id out", param="key_id")
        session = engine_pb2.SessionRef(owner=key_id, name=session.name)
    try:
        kept = await sessions.take_in(session, request.stream())
    except TemperError as error:
        refusal = response_of(error, request.url.path)
        refusal.headers.update(_CLOSE)
        return refusal
    except HTTPException as error:  # raised by the middleware that counts the body
        raise HTTPException(error.status_code, error.detail, {**(error.headers or {}), **_CLOSE}) from error
    return Response(SessionObject.of(kept.history, kept.client.id).model_dump_json(), media_type="application/json")


@routes.post(f"{_ROUTE}/save", Permission(INFERENCE))
async def save_session(session_id: SessionPath, sessions: Sessions) -> SessionObject:
    """Writes what is kept of a session to disk and object store, whichever its engine has, and answers when that is
    done. It is then found again after a restart, and by other engines that share the store."""
    kept = await sessions.save(session_of(session_id))
    return SessionObject.of(kept.history, kept.client.id)


@routes.get(_ROUTE, Permission(INFERENCE))
async def get_session(session_id: SessionPath, sessions: Sessions) -> SessionObject:
    """What is kept of a session."""
    kept = await sessions.get(session_of(session_id))
    return SessionObject.of(kept.history, kept.client.id)


@routes.delete(_ROUTE, Permission(INFERENCE))
async def delete_session(session_id: SessionPath, sessions: Sessions) -> DeletedSession:
    """Forgets a session on all engines, and everything that only it has use for."""
    await sessions.delete(session_of(session_id))
    return DeletedSession(id=session_id)
