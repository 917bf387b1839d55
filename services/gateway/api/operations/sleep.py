"""/v1/engine: engines sleep, and give the memory of their devices to others meanwhile, until they are woken."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal, TypeAlias

import grpc
from fastapi import Query
from grpc import aio
from pydantic import BaseModel, ConfigDict

from services.common.errors import Conflict, NotFound, Unavailable
from services.common.pb import engine_pb2
from services.gateway.api.base.routing import Routes
from services.gateway.api.operations.health import Health, HealthServices
from services.gateway.auth.route_permissions import ADMIN, ANY_KEY, Permission
from services.gateway.engines.client import EngineClient

routes = Routes("engine")
_PATIENCE_SECONDS = 2.0
"""Longest wait for one engine."""
State: TypeAlias = Literal["awake", "going_to_sleep", "asleep", "waking", "away"]


class SleepingEngine(BaseModel):
    """Whether one engine sleeps."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    name: str
    state: State
    """"going_to_sleep": its requests end first. "waking": it begins to load the model. "away": it does not answer, as
    while it loads."""


class SleepingEngines(BaseModel):
    """Engines, and whether they sleep."""

    object: Literal["list"] = "list"
    data: list[SleepingEngine]


Chosen = Annotated[
    str | None, Query(min_length=1, max_length=256, description="Id or name of one engine; default: all.")
]


@routes.get("/v1/engine", Permission(ANY_KEY))
async def list_sleeping(health: Health) -> SleepingEngines:
    """Whether the engines sleep."""
    return await _each(health, None, _state)


@routes.post("/v1/engine/sleep", Permission(ADMIN, audited=True), status_code=202)
async def sleep(health: Health, engine: Chosen = None) -> SleepingEngines:
    """Puts engines to sleep: what they answer ends first, a training job is handed back with its checkpoint, then they
    give all memory of their devices back. May be repeated."""
    return await _each(health, engine, _sleep)


@routes.post("/v1/engine/wake", Permission(ADMIN, audited=True), status_code=202)
async def wake(health: Health, engine: Chosen = None) -> SleepingEngines:
    """Wakes engines: they load the model as at a start. May be repeated."""
    return await _each(health, engine, _wake)


async def _each(health: HealthServices, engine: str | None, call: Any) -> SleepingEngines:
    clients = [c for c in health.inference.engines.clients if engine in (None, c.id, c.name)]
    if not clients and engine is not None:
        raise NotFound(f"there is no engine {engine[:80]!r}; GET /v1/engine lists them", param="engine")
    states = await asyncio.gather(*(call(client) for client in clients))
    if call is not _state and "away" in states and len(clients) == states.count("away"):
        raise Unavailable("no engine answers; GET /healthz tells why", retry_after=2.0)
    return SleepingEngines(
        data=[
            SleepingEngine(id=client.id, name=client.name or client.id, state=state)
            for client, state in zip(clients, states, strict=True)
        ]
    )


async def _state(client: EngineClient) -> State:
    try:
        status = await client.engine().GetStatus(engine_pb2.GetStatusRequest(), timeout=_PATIENCE_SECONDS)
    except aio.AioRpcError:
        return "away"
    if status.asleep:
        return "asleep"
    return "going_to_sleep" if status.draining else "awake"


async def _sleep(client: EngineClient) -> State:
    try:
        answer = await client.engine().Sleep(engine_pb2.SleepRequest(), timeout=_PATIENCE_SECONDS)
    except aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            raise Conflict(
                f"engine {client.id} is of an earlier release, which cannot sleep: stop its process instead",
                param="engine",
            ) from error
        return "away"
    return "asleep" if answer.asleep else "going_to_sleep"


async def _wake(client: EngineClient) -> State:
    try:
        answer = await client.engine().Wake(engine_pb2.WakeRequest(), timeout=_PATIENCE_SECONDS)
    except aio.AioRpcError as error:
        return "awake" if error.code() == grpc.StatusCode.UNIMPLEMENTED else "away"
    return "waking" if answer.asleep else "awake"
