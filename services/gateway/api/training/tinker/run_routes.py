"""What Tinker's RestClient asks: runs, their checkpoints, sessions."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Query, Response

from services.common.errors import InvalidRequest
from services.gateway.api.base.routing import Routes
from services.gateway.api.training.tinker.bodies import TtlChange, WeightsInfo
from services.gateway.api.training.tinker.names import KINDS, CheckpointKind, CheckpointPath, RunId
from services.gateway.api.training.tinker.records import CheckpointRecord, RunRecord
from services.gateway.api.training.tinker.services import Tinker, TinkerServices
from services.gateway.auth.route_permissions import ANY_KEY, TRAIN, Permission

routes = Routes("tinker")
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0)]
Access = Annotated[Literal["owned", "accessible"], Query(alias="access_scope")]
"""Sent with every question by Tinker's SDK. Both are the same here: nothing is shared between keys."""
CHECKPOINT = "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"
"""Path of a checkpoint."""


@routes.get("/api/v1/training_runs", Permission(TRAIN), include_in_schema=False)
async def list_training_runs(
    tinker: Tinker, limit: Limit = 20, offset: Offset = 0, _access: Access = "owned"
) -> dict[str, Any]:
    """The caller's runs, newest session first."""
    runs = await _runs(tinker)
    page = [await _described(tinker, run) for run in runs[offset : offset + limit]]
    return {"training_runs": page, "cursor": _cursor(offset, limit, len(runs))}


@routes.get("/api/v1/training_runs/{run_id}", Permission(TRAIN), include_in_schema=False)
async def get_training_run(run_id: str, tinker: Tinker, _access: Access = "owned") -> dict[str, Any]:
    """One run."""
    return await _described(tinker, await tinker.records.run(RunId.parse(run_id)))


@routes.get("/api/v1/training_runs/{run_id}/checkpoints", Permission(TRAIN), include_in_schema=False)
async def list_checkpoints(run_id: str, tinker: Tinker) -> dict[str, Any]:
    """A run's checkpoints, for training and for sampling."""
    run = await tinker.records.run(RunId.parse(run_id))
    found = await tinker.records.checkpoints(RunId.parse(run.id))
    return {"checkpoints": [_checkpoint(one) for one in found]}


@routes.get("/api/v1/checkpoints", Permission(TRAIN), include_in_schema=False)
async def list_user_checkpoints(tinker: Tinker, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
    """Checkpoints of all runs of the caller, newest first."""
    found = [one for run in await _runs(tinker) for one in await tinker.records.checkpoints(RunId.parse(run.id))]
    found.sort(key=lambda one: -one.created_at)
    page = [_checkpoint(one) for one in found[offset : offset + limit]]
    return {"checkpoints": page, "cursor": _cursor(offset, limit, len(found))}


@routes.delete(CHECKPOINT, Permission(TRAIN, audited=True), status_code=204, include_in_schema=False)
async def delete_checkpoint(run_id: str, kind: str, name: str, tinker: Tinker) -> Response:
    """Removes a checkpoint. A sampler's version of the adapter stays until the adapter is pruned."""
    await tinker.records.remove_checkpoint(await _found(tinker, run_id, kind, name))
    return Response(status_code=204)


@routes.put(f"{CHECKPOINT}/ttl", Permission(TRAIN, audited=True), status_code=204, include_in_schema=False)
async def set_checkpoint_ttl(run_id: str, kind: str, name: str, body: TtlChange, tinker: Tinker) -> Response:
    """Sets when a checkpoint is removed; null: never."""
    record = await _found(tinker, run_id, kind, name)
    expires_at = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
    await tinker.records.add_checkpoint(record.model_copy(update={"expires_at": expires_at}))
    return Response(status_code=204)


@routes.post("/api/v1/weights_info", Permission(ANY_KEY), include_in_schema=False)
async def weights_info(body: WeightsInfo, tinker: Tinker) -> dict[str, Any]:
    """What a new run of a checkpoint needs to know."""
    path = CheckpointPath.parse(body.tinker_path)
    if path.run is None:
        config = await tinker.threads.run(tinker.registry.config, path.adapter) if path.adapter else {}
        return {"base_model": tinker.base_model, "is_lora": True, "lora_rank": config.get("r")}
    await tinker.records.checkpoint(path.run, path.kind, path.name)
    run = await tinker.records.run(path.run)
    return {
        "base_model": run.base_model,
        "is_lora": True,
        "lora_rank": run.rank,
        "train_unembed": False,
        "train_mlp": run.train_mlp,
        "train_attn": run.train_attn,
    }


@routes.get("/api/v1/sessions", Permission(ANY_KEY), include_in_schema=False)
async def list_sessions(
    tinker: Tinker, limit: Limit = 20, offset: Offset = 0, _access: Access = "owned"
) -> dict[str, Any]:
    """The caller's sessions, newest first."""
    return {"sessions": (await tinker.records.sessions())[offset : offset + limit]}


@routes.get("/api/v1/sessions/{session_id}", Permission(ANY_KEY), include_in_schema=False)
async def get_session(session_id: str, tinker: Tinker, _access: Access = "owned") -> dict[str, Any]:
    """A session and its runs. Its samplers are no records: an id says all of one."""
    record = await tinker.records.session(session_id)
    metadata = record.user_metadata
    return {
        "training_run_ids": [run.id for run in await tinker.records.runs(record.id)],
        "sampler_ids": [],
        "user_metadata": None if metadata is None else {name: str(value) for name, value in metadata.items()},
        "display_name": record.display_name,
    }


async def _runs(tinker: TinkerServices) -> list[RunRecord]:
    return [run for session in await tinker.records.sessions() for run in (await tinker.records.runs(session))[::-1]]


async def _found(tinker: TinkerServices, run_id: str, kind: str, name: str) -> CheckpointRecord:
    if kind not in KINDS:
        raise InvalidRequest(f"checkpoints are {' and '.join(KINDS)}, not {kind[:40]!r}", param="checkpoint_id")
    known: CheckpointKind = "weights" if kind == "weights" else "sampler_weights"
    return await tinker.records.checkpoint(RunId.parse(run_id), known, name)


async def _described(tinker: TinkerServices, run: RunRecord) -> dict[str, Any]:
    found = await tinker.records.checkpoints(RunId.parse(run.id))
    last = {one.kind: one for one in found}
    metadata = run.user_metadata
    return {
        "training_run_id": run.id,
        "base_model": run.base_model,
        "model_owner": run.owner or "anonymous",
        "is_lora": True,
        "lora_rank": run.rank,
        "last_request_time": _time(max([run.created_at, *(one.created_at for one in found)])),
        "last_checkpoint": _checkpoint(last["weights"]) if "weights" in last else None,
        "last_sampler_checkpoint": _checkpoint(last["sampler_weights"]) if "sampler_weights" in last else None,
        "user_metadata": None if metadata is None else {name: str(value) for name, value in metadata.items()},
    }


def _checkpoint(record: CheckpointRecord) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{record.kind}/{record.name}",
        "checkpoint_type": "training" if record.kind == "weights" else "sampler",
        "time": _time(record.created_at),
        "tinker_path": record.path,
        "size_bytes": record.size_bytes,
        "public": False,
        "user_metadata": record.user_metadata,
        "expires_at": None if record.expires_at is None else _time(record.expires_at),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}
