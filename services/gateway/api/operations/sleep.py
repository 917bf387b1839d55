"""/v1/engine: engines sleep, and give the memory of their devices to others meanwhile, until they are woken."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, cast

import grpc
from fastapi import Query
from grpc import aio
from pydantic import BaseModel, ConfigDict

from services.common.errors import Conflict, InvalidRequest, NotFound, Unavailable
from services.common.pb import engine_pb2
from services.common.shutdown import SleepLevel
from services.gateway.api.base.routing import Routes
from services.gateway.api.operations.health import Health, HealthServices
from services.gateway.auth.route_permissions import ADMIN, ANY_KEY, Permission
from services.gateway.engines.client import EngineClient

routes = Routes("engine")
_PATIENCE_SECONDS = 2.0
"""Longest wait for one engine."""
_WAKE_SECONDS = 30.0
"""Longest wait for one that takes its memory back."""
State: TypeAlias = Literal["awake", "going_to_sleep", "asleep", "waking", "away"]
Found: TypeAlias = tuple[State, SleepLevel | None]


class SleepingEngine(BaseModel):
    """Whether one engine sleeps."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    name: str
    state: State
    """"going_to_sleep": its requests end first. "waking": it has its memory back, and begins to serve. "away": it does
    not answer, as while it loads."""
    level: SleepLevel | None = None
    """What it gave back, of one that is asleep."""


class SleepingEngines(BaseModel):
    """Engines, and whether they sleep."""

    object: Literal["list"] = "list"
    data: list[SleepingEngine]


Level = Annotated[
    SleepLevel,
    Query(
        description="What is given back. cache: keys, values and states. weights: the weights, too, which wait in host "
        "memory. From both it wakes within seconds. process: all that it has of the device; it wakes as it starts. "
        "An engine on a CPU has cache and process."
    ),
]
Chosen = Annotated[
    str | None, Query(min_length=1, max_length=256, description="Id or name of one engine; default: all.")
]


@routes.get("/v1/engine", Permission(ANY_KEY))
async def list_sleeping(health: Health) -> SleepingEngines:
    """Whether the engines sleep."""
    return await _each(health, None, _state)


@routes.post("/v1/engine/sleep", Permission(ADMIN, audited=True), status_code=202)
async def sleep(health: Health, engine: Chosen = None, level: Level = "process") -> SleepingEngines:
    """Puts engines to sleep: what they answer ends first, a training job is handed back with its checkpoint, then they
    give memory of their devices back. May be repeated; one that sleeps already stays at its level."""
    return await _each(health, engine, partial(_sleep, level))


@routes.post("/v1/engine/wake", Permission(ADMIN, audited=True), status_code=202)
async def wake(health: Health, engine: Chosen = None) -> SleepingEngines:
    """Wakes engines: they take their memory back, and load what they have given away. May be repeated."""
    return await _each(health, engine, _wake)


async def _each(health: HealthServices, engine: str | None, call: Any) -> SleepingEngines:
    clients = [c for c in health.inference.engines.clients if engine in (None, c.id, c.name)]
    if not clients and engine is not None:
        raise NotFound(f"there is no engine {engine[:80]!r}; GET /v1/engine lists them", param="engine")
    found = await asyncio.gather(*(call(client) for client in clients))
    if call is not _state and found and all(state == "away" for state, _ in found):
        raise Unavailable("no engine answers; GET /healthz tells why", retry_after=2.0)
    return SleepingEngines(
        data=[
            SleepingEngine(id=client.id, name=client.name or client.id, state=state, level=level)
            for client, (state, level) in zip(clients, found, strict=True)
        ]
    )


async def _state(client: EngineClient) -> Found:
    try:
        status = await client.engine_stub().GetStatus(engine_pb2.GetStatusRequest(), timeout=_PATIENCE_SECONDS)
    except aio.AioRpcError:
        return "away", None
    if status.asleep:
        return "asleep", cast(SleepLevel, status.sleep_level or "process")
    return "going_to_sleep" if status.draining else "awake", None


async def _sleep(level: SleepLevel, client: EngineClient) -> Found:
    try:
        answer = await client.engine_stub().Sleep(engine_pb2.SleepRequest(level=level), timeout=_PATIENCE_SECONDS)
    except aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            raise Conflict(
                f"engine {client.id} is of an earlier release, which cannot sleep: stop its process instead",
                param="engine",
            ) from error
        if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
            raise InvalidRequest(f"engine {client.id}: {error.details()}", param="level") from error
        return "away", None
    return (await _state(client)) if answer.asleep else ("going_to_sleep", None)


async def _wake(client: EngineClient) -> Found:
    try:
        answer = await client.engine_stub().Wake(engine_pb2.WakeRequest(), timeout=_WAKE_SECONDS)
    except aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise Conflict(f"engine {client.id}: {error.details()}", param="engine") from error
        return "awake" if error.code() == grpc.StatusCode.UNIMPLEMENTED else "away", None
    return "waking" if answer.asleep else "awake", None
