"""/v1/train/sessions and /v1/train/futures: a researcher's own training loop, call by call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Query, Response
from pydantic_core import from_json, to_json

from services.common.jobs.training_sessions.calls import Call, Load, OpenSession, OptimStep, Sample, Save, check_tokens
from services.common.jobs.trajectories.session_data import ForwardBackwardBody, ForwardBody
from services.common.pb import sessions_pb2 as pb
from services.gateway.api.base.idempotency import Once
from services.gateway.api.base.routing import Routes, provided
from services.gateway.api.training.rollouts import resolve_data
from services.gateway.auth.caller import check_attach
from services.gateway.auth.route_permissions import TRAIN, Permission
from services.gateway.core.admission import Lifecycle
from services.gateway.core.errors import engine_error, payload_of
from services.gateway.engines.calls.training_sessions import TrainingSessionRouter
from services.gateway.engines.pool import EnginePool


@dataclass(frozen=True, slots=True)
class TrainingSessionServices:
    """Training sessions, each in one of the engines."""

    engines: EnginePool
    sessions: TrainingSessionRouter
    lifecycle: Lifecycle


TrainingSessions = Annotated[TrainingSessionServices, provided(TrainingSessionServices)]


routes = Routes("training sessions")

_STATES = {
    pb.FUTURE_STATE_PENDING: "pending",
    pb.FUTURE_STATE_DONE: "done",
    pb.FUTURE_STATE_FAILED: "failed",
}
_USER_CODES = frozenset(
    {
        "invalid_request",
        "does_not_fit",
        "not_found",
        "model_not_found",
        "conflict",
        "adapter_rejected",
    }
)
"""Error codes of calls that would fail again as they are. Any other call may succeed in a new session, or later."""


@routes.post(
    "/v1/train/sessions", Permission(TRAIN, audited=True, idempotent=True), status_code=201, response_class=Response
)
async def open_session(body: OpenSession, training: TrainingSessions, once: Once) -> Any:
    """Opens a session with a new adapter, an adapter version or a checkpoint; answers when it can be called."""

    async def open_one() -> Response:
        session = await training.sessions.open(body)
        headers = {"location": f"/v1/train/sessions/{from_json(session)['id']}"}
        return Response(session, 201, headers=headers, media_type="application/json")

    return await once(open_one, body=body)


@routes.get("/v1/train/sessions", Permission(TRAIN), response_class=Response)
async def list_sessions(training: TrainingSessions) -> Response:
    """Open sessions of all engines."""
    sessions = await training.sessions.open_sessions()
    return Response(b'{"object":"list","data":[' + b",".join(sessions) + b"]}", media_type="application/json")


@routes.get("/v1/train/sessions/{session_id}", Permission(TRAIN), response_class=Response)
async def get_session(session_id: str, training: TrainingSessions) -> Response:
    """One session; 410 with what happened to it when it has ended. Keeps it from expiring."""
    return Response(await training.sessions.get(session_id), media_type="application/json")


@routes.delete("/v1/train/sessions/{session_id}", Permission(TRAIN, audited=True))
async def close_session(session_id: str, training: TrainingSessions) -> dict[str, Any]:
    """Ends a session and frees its memory. Calls that have not ended fail."""
    await training.sessions.close(session_id)
    return {"id": session_id, "object": "train.session", "deleted": True}


@routes.post(
    "/v1/train/sessions/{session_id}/forward_backward",
    Permission(TRAIN, audited=True),
    status_code=202,
    response_class=Response,
)
async def forward_backward(session_id: str, body: ForwardBackwardBody, training: TrainingSessions) -> Response:
    """Adds the gradient of a loss to what has been accumulated."""
    return await _submit(training, session_id, await resolve_data(body, training.engines))


@routes.post(
    "/v1/train/sessions/{session_id}/forward", Permission(TRAIN, audited=True), status_code=202, response_class=Response
)
async def forward(session_id: str, body: ForwardBody, training: TrainingSessions) -> Response:
    """Log-probabilities and the loss, without gradient."""
    return await _submit(training, session_id, await resolve_data(body, training.engines))


@routes.post(
    "/v1/train/sessions/{session_id}/optim_step",
    Permission(TRAIN, audited=True),
    status_code=202,
    response_class=Response,
)
async def optim_step(session_id: str, body: OptimStep, training: TrainingSessions) -> Response:
    """An AdamW step over the accumulated gradients."""
    return await _submit(training, session_id, body)


@routes.post(
    "/v1/train/sessions/{session_id}/sample", Permission(TRAIN, audited=True), status_code=202, response_class=Response
)
async def sample(session_id: str, body: Sample, training: TrainingSessions) -> Response:
    """Completions of the session's weights as they are when the call's turn comes."""
    return await _submit(training, session_id, body)


@routes.post(
    "/v1/train/sessions/{session_id}/save", Permission(TRAIN, audited=True), status_code=202, response_class=Response
)
async def save(session_id: str, body: Save, training: TrainingSessions) -> Response:
    """Publishes a version of an adapter, or keeps a checkpoint with the optimizer."""
    if body.attach:
        check_attach("attach")
    return await _submit(training, session_id, body)


@routes.post(
    "/v1/train/sessions/{session_id}/load", Permission(TRAIN, audited=True), status_code=202, response_class=Response
)
async def load(session_id: str, body: Load, training: TrainingSessions) -> Response:
    """Replaces the weights by a version's or a checkpoint's."""
    return await _submit(training, session_id, body)


@routes.get("/v1/train/futures/{future_id}", Permission(TRAIN), response_class=Response)
async def get_future(
    future_id: str, training: TrainingSessions, wait: Annotated[float, Query(ge=0, le=60)] = 0.0
) -> Response:
    """A call: at once, or as soon as it has ended but after `wait` seconds at most."""
    found = await training.sessions.wait(future_id, wait, training.lifecycle.closing)
    return Response(_future_body(found), media_type="application/json")


async def _submit(training: TrainingSessionServices, session_id: str, call: Call) -> Response:
    info = training.engines.served.info
    check_tokens(call, vocab_size=info.vocab_size, max_train_tokens=info.max_train_tokens, max_call_tokens=0)
    found = await training.sessions.submit(session_id, call)
    headers = {"location": f"/v1/train/futures/{found.id}"}
    return Response(_future_body(found), 202, headers=headers, media_type="application/json")


def _future_body(found: pb.Future) -> bytes:
    """Future as JSON. Its result is the engine's own JSON, which may be megabytes and is not parsed here."""
    body: dict[str, Any] = {
        "id": found.id,
        "object": "train.future",
        "session": found.session,
        "seq": found.seq or None,
        "operation": found.operation or None,
        "state": _STATES.get(found.state, "pending"),
    }
    if found.state == pb.FUTURE_STATE_PENDING:
        queue: dict[str, Any] = {"state": "running" if found.running else "waiting", "ahead": found.ahead}
        if found.missing_seq:
            queue |= {"state": "waiting_for_seq", "missing_seq": found.missing_seq}
        body["queue"] = queue
    if found.HasField("error"):
        error = engine_error(found.error)
        body["error"] = payload_of(error)["error"] | {"category": "user" if error.code in _USER_CODES else "server"}
    head = to_json(body)
    return head if not found.result_json else head[:-1] + b',"result":' + found.result_json + b"}"
