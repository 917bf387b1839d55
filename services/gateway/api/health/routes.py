"""/livez, /readyz, /healthz, /metrics and /version, and the names that routers ask for in other servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from services.common.telemetry.process import installed_version
from services.common.telemetry.prometheus import expose
from services.gateway.api.base.routing import Routes
from services.gateway.api.health.gauges import Health, HealthServices, refresh
from services.gateway.auth.route_permissions import ANY_KEY, PUBLIC, Permission

routes = Routes("health")


class Version(BaseModel):
    """Version of the server."""

    version: str


class Load(BaseModel):
    """Completions (choices) that are waiting or being answered."""

    server_load: int


_PATIENCE = 1.0


@routes.get("/livez", PUBLIC, response_class=PlainTextResponse)
async def livez() -> str:
    """The process answers. Stays 200 while draining, so that nobody kills it."""
    return "ok"


@routes.post("/ping", PUBLIC, response_class=PlainTextResponse)
@routes.get("/ping", PUBLIC, response_class=PlainTextResponse)
@routes.get("/health", PUBLIC, response_class=PlainTextResponse)
@routes.get("/readyz", PUBLIC, response_class=PlainTextResponse)
async def readyz(health: Health) -> Response:
    """200 when completions can be served: an engine is ready and the gateway is not stopping."""
    if health.lifecycle.stopping.is_set():
        return PlainTextResponse("stopping", 503)
    if not health.inference.engines.ready:
        return PlainTextResponse("no engine is ready", 503)
    return PlainTextResponse("ok")


@routes.get("/version", Permission(ANY_KEY))
async def version() -> Version:
    """Which Temper this is."""
    return Version(version=installed_version())


@routes.get("/load", Permission(ANY_KEY))
async def load(health: Health) -> Load:
    """How busy this gateway is, as vLLM says it."""
    return Load(server_load=health.inference.admission.in_flight)


async def _works(call: Awaitable[Any]) -> str:
    try:
        async with asyncio.timeout(_PATIENCE):
            await call
    except Exception as error:
        return f"unavailable: {str(error) or type(error).__name__}"
    return "ok"


def _engines(health: HealthServices) -> list[dict[str, Any]]:
    found = []
    for client in health.inference.engines.clients:
        status = client.status
        entry: dict[str, Any] = {
            "id": client.id,
            "address": client.address,
            "ready": client.ready,
            "breaker": client.breaker.state.name.lower(),
            "leaving": client.leaving_since is not None,
            "load": round(client.load, 2),
        }
        if status is None:
            entry["error"] = client.last_error
        else:
            entry |= {
                "running": status.running,
                "waiting": status.waiting,
                "draining": status.draining,
                "job_id": status.job_id or None,
                "attached_adapter": status.attached_adapter or None,
            }
        found.append(entry)
    return found


@routes.get("/healthz", PUBLIC)
async def healthz(health: Health) -> JSONResponse:
    """What works and what does not. 200 while the gateway is alive; see `status`."""
    redis, store = await asyncio.gather(
        _works(health.queue.ping()), _works(health.threads.run(health.registry.attached))
    )
    healthy = health.inference.engines.ready and redis == "ok" and store == "ok"
    return JSONResponse(
        {
            "status": "ok" if healthy else "degraded",
            "model": health.inference.settings.served_model_name,
            "engines": _engines(health),
            "redis": redis,
            "object_store": store,
        }
    )


@routes.get("/metrics", PUBLIC, response_class=PlainTextResponse)
async def metrics(health: Health, request: Request) -> Response:
    """Prometheus text format, or OpenMetrics for who accepts it."""
    await refresh(health)
    body, content_type = expose(health.inference.metrics.registry, request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})
