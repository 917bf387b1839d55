"""/livez, /readyz, /healthz, /metrics and /version, and the names that routers ask for in other servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from services.common.telemetry.prometheus import expose
from services.common.telemetry.version import installed_version
from services.gateway.api.base.routing import router
from services.gateway.api.health.gauges import refresh
from services.gateway.context import Gateway, GatewayDep

routes = router("health")


class Version(BaseModel):
    """Of the server."""

    version: str


class Load(BaseModel):
    """Completions (choices) that are waiting or being answered."""

    server_load: int


_PATIENCE = 1.0


@routes.get("/livez", response_class=PlainTextResponse)
async def livez() -> str:
    """The process answers. Stays 200 while draining, so that nobody kills it."""
    return "ok"


@routes.post("/ping", response_class=PlainTextResponse)
@routes.get("/ping", response_class=PlainTextResponse)
@routes.get("/health", response_class=PlainTextResponse)
@routes.get("/readyz", response_class=PlainTextResponse)
async def readyz(gateway: GatewayDep) -> Response:
    """200 when completions can be served: an engine is ready and the gateway is not stopping."""
    if gateway.stopping.is_set():
        return PlainTextResponse("stopping", 503)
    if not gateway.engines.ready:
        return PlainTextResponse("no engine is ready", 503)
    return PlainTextResponse("ok")


@routes.get("/version")
async def version() -> Version:
    """Which Temper this is."""
    return Version(version=installed_version())


@routes.get("/load")
async def load(gateway: GatewayDep) -> Load:
    """How busy this gateway is, as vLLM says it."""
    return Load(server_load=gateway.admission.taken)


async def _works(call: Awaitable[Any]) -> str:
    try:
        async with asyncio.timeout(_PATIENCE):
            await call
    except Exception as error:
        return f"unavailable: {str(error) or type(error).__name__}"
    return "ok"


def _engines(gateway: Gateway) -> list[dict[str, Any]]:
    found = []
    for client in gateway.engines.clients:
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


@routes.get("/healthz")
async def healthz(gateway: GatewayDep) -> JSONResponse:
    """What works and what does not. 200 while the gateway is alive; see `status`."""
    redis, store = await asyncio.gather(_works(gateway.queue.ping()), _works(gateway.store(gateway.registry.attached)))
    healthy = gateway.engines.ready and redis == "ok" and store == "ok"
    return JSONResponse(
        {
            "status": "ok" if healthy else "degraded",
            "model": gateway.settings.served_model_name,
            "engines": _engines(gateway),
            "redis": redis,
            "object_store": store,
        }
    )


@routes.get("/metrics", response_class=PlainTextResponse)
async def metrics(gateway: GatewayDep, request: Request) -> Response:
    """Prometheus text format, or OpenMetrics for who accepts it."""
    await refresh(gateway)
    body, content_type = expose(gateway.metrics.registry, request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})
