"""/pause, /resume and /is_paused: vLLM's calls by which trainers hold an engine while they bring it new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from fastapi import Query
from grpc import aio

from services.common.errors import Unavailable
from services.common.pb import engine_pb2
from services.gateway.api.base.routing import Routes
from services.gateway.api.operations.health import Health, HealthServices
from services.gateway.auth.route_permissions import ADMIN, ANY_KEY, Permission
from services.gateway.engines.client import EngineClient

routes = Routes("engine")
_PATIENCE_SECONDS = 10.0
"""Longest wait for one engine, which answers between two steps."""
Mode = Annotated[
    Literal["keep"],
    Query(description="keep: requests stay as they are, and go on where they were. vLLM's abort and wait are refused."),
]


@routes.post("/pause", Permission(ADMIN, audited=True), response_model=None)
async def pause(health: Health, mode: Mode) -> dict[str, str]:
    """No engine computes anything for requests until `/resume`, at most for TEMPER_PAUSE_SECONDS. Loading an adapter
    needs no pause here: versions do not change, a request keeps the one that it began with, and what is cached stays
    right."""
    del mode
    seconds = health.inference.settings.pause_seconds
    await _each(health, lambda engine: engine.engine_stub().Pause(engine_pb2.PauseRequest(seconds=seconds)))
    return {"status": "paused"}


@routes.post("/resume", Permission(ADMIN, audited=True), response_model=None)
async def resume(health: Health) -> dict[str, str]:
    """Engines go on where they were. May be repeated."""
    await _each(health, lambda engine: engine.engine_stub().Resume(engine_pb2.ResumeRequest()))
    return {"status": "resumed"}


@routes.get("/is_paused", Permission(ANY_KEY), response_model=None)
async def is_paused(health: Health) -> dict[str, bool]:
    """Whether any engine is paused."""
    found: list[bool] = []

    async def ask(engine: EngineClient) -> None:
        found.append((await engine.engine_stub().GetStatus(engine_pb2.GetStatusRequest())).paused)

    await _each(health, ask)
    return {"is_paused": any(found)}


async def _each(health: HealthServices, call: Callable[[EngineClient], Awaitable[object]]) -> None:
    """Asks all engines; raises Unavailable if one does not answer, with the others asked."""
    clients = health.inference.engines.clients
    answers = await asyncio.gather(
        *(asyncio.wait_for(call(client), _PATIENCE_SECONDS) for client in clients), return_exceptions=True
    )
    for client, answer in zip(clients, answers, strict=True):
        if isinstance(answer, aio.AioRpcError | TimeoutError):
            raise Unavailable(f"engine {client.address} does not answer; ask again", retry_after=2.0) from answer
        if isinstance(answer, BaseException):
            raise answer
    if not clients:
        raise Unavailable("there is no engine; GET /healthz tells why", retry_after=2.0)
