"""Service of Tinker's API: what there is here, sessions and their heartbeats, samplers."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Response

from services.common.adapters.names import BASE
from services.common.errors import Gone, InvalidRequest, NotFound, Unavailable
from services.gateway.api.base.routing import Routes
from services.gateway.api.training.tinker.bodies import (
    ClientConfig,
    CreateSampler,
    CreateSession,
    Finish,
    Heartbeat,
)
from services.gateway.api.training.tinker.names import CheckpointPath, Sampler, new_session
from services.gateway.api.training.tinker.records import SessionRecord
from services.gateway.api.training.tinker.services import Tinker, TinkerServices
from services.gateway.auth.caller import owner
from services.gateway.auth.route_permissions import ANY_KEY, INFERENCE, Permission

routes = Routes("tinker")
_CONFIG: dict[str, Any] = {
    # One chunk after the other: a session takes only so many calls ahead of one that is missing.
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": True,
    "pjwt_auth_enabled": False,
    "custom_loss_server_side": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
}
_BYTES_PER_TOKEN = 12
"""The least that the SDK counts for a token of a datum: its id, and its target."""


@routes.post("/api/v1/client/config", Permission(ANY_KEY), include_in_schema=False)
async def client_config(_: ClientConfig, tinker: Tinker) -> dict[str, Any]:
    """Behaviour that this server asks of the SDK."""
    return _CONFIG | {"fwdbwd_max_chunk_bytes_count": _BYTES_PER_TOKEN * tinker.settings.session_call_tokens}


@routes.post("/api/v1/client/dynamic_config", Permission(ANY_KEY), include_in_schema=False)
async def client_dynamic_config(_: ClientConfig) -> dict[str, Any]:
    """What of that may change while a client runs."""
    return {"sample_cancel_enabled": True}


@routes.get("/api/v1/healthz", Permission(ANY_KEY), include_in_schema=False)
async def healthz() -> dict[str, Any]:
    """The gateway answers."""
    return {"status": "ok"}


@routes.get("/api/v1/get_server_capabilities", Permission(ANY_KEY), include_in_schema=False)
async def get_server_capabilities(tinker: Tinker) -> dict[str, Any]:
    """The one model that is served."""
    info = tinker.engines.served.info
    return {
        "supported_models": [
            {
                "model_name": tinker.base_model,
                "max_context_length": info.max_model_len,
                "trainable": any(client.status and client.status.sessions_max for client in tinker.engines.clients),
                "sampleable": True,
            }
        ]
    }


@routes.post("/api/v1/telemetry", Permission(ANY_KEY), include_in_schema=False)
async def telemetry() -> dict[str, Any]:
    """Reports of the SDK about itself are taken and dropped, unread."""
    return {"status": "accepted"}


@routes.post("/api/v1/create_session", Permission(ANY_KEY), include_in_schema=False)
async def create_session(body: CreateSession, tinker: Tinker) -> dict[str, Any]:
    """Begins a session: what one client does, from its start to its end."""
    record = SessionRecord(
        id=new_session(),
        owner=owner(),
        created_at=time.time(),
        tags=tuple(body.tags),
        user_metadata=body.user_metadata,
        project_id=body.project_id,
        display_name=body.display_name,
    )
    await tinker.records.add_session(record)
    return {"type": "create_session", "session_id": record.id}


@routes.post("/api/v1/session_heartbeat", Permission(ANY_KEY), include_in_schema=False)
async def session_heartbeat(body: Heartbeat, tinker: Tinker) -> dict[str, Any]:
    """Keeps the runs of a session from expiring; 410 once it is finished."""
    record = await tinker.records.session(body.session_id)
    if record.finished is not None:
        raise Gone(f"session {record.id} is finished", param="session_id")
    for run in await tinker.records.runs(record.id):
        try:
            await tinker.sessions.get(run.training_session)
        except (NotFound, Unavailable):  # what has become of it is said to the next call of it
            continue
    return {"type": "session_heartbeat"}


@routes.post("/api/v1/sessions/{session_id}/finish", Permission(ANY_KEY), status_code=204, include_in_schema=False)
async def finish_session(session_id: str, body: Finish, tinker: Tinker) -> Response:
    """Ends a session: its runs give their memory back. What was saved stays."""
    record = await tinker.records.session(session_id)
    for run in await tinker.records.runs(record.id):
        try:
            await tinker.sessions.close(run.training_session)
        except (NotFound, Unavailable):  # it has ended already, or expires by itself
            continue
    reason = str(body.reason.get("type", "success"))[:64]
    await tinker.records.add_session(record.model_copy(update={"finished": reason}))
    return Response(status_code=204)


@routes.post("/api/v1/create_sampling_session", Permission(INFERENCE), include_in_schema=False)
async def create_sampling_session(body: CreateSampler, tinker: Tinker) -> dict[str, Any]:
    """Begins sampling of the base model, or of weights that were saved for it."""
    record = await tinker.records.session(body.session_id)
    policy = await policy_of(tinker, body.base_model, body.model_path)
    sampler = Sampler(record.id, body.sampling_session_seq_id, policy)
    return {"type": "create_sampling_session", "sampling_session_id": str(sampler)}


@routes.get("/api/v1/samplers/{sampler_id}", Permission(INFERENCE), include_in_schema=False)
async def get_sampler(sampler_id: str, tinker: Tinker) -> dict[str, Any]:
    """A sampling session."""
    sampler = Sampler.parse(sampler_id)
    await tinker.records.session(sampler.session)
    return {"sampler_id": str(sampler), "base_model": tinker.base_model, "model_path": sampler.path}


async def policy_of(tinker: TinkerServices, base_model: str | None, model_path: str | None) -> str:
    """The policy that samples: "base" or "name@n".

    Raises:
        InvalidRequest: neither is given, or it is another model, or no weights to sample from.
        NotFound, ModelNotFound: there are no such weights.
    """
    if base_model is not None:
        tinker.check_base_model(base_model)
    if model_path is None:
        if base_model is None:
            raise InvalidRequest("give base_model or model_path", param="base_model")
        return BASE
    path = CheckpointPath.parse(model_path)
    if path.adapter is not None:
        await tinker.threads.run(tinker.registry.manifest, path.adapter)
        return str(path.adapter)
    if path.run is None or path.kind == "weights":
        raise InvalidRequest(
            f"{model_path} is for training: save_weights_for_sampler makes weights that can be sampled",
            param="model_path",
        )
    return (await tinker.records.checkpoint(path.run, path.kind, path.name)).target
