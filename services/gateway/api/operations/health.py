"""/livez, /readyz, /healthz, /metrics and /version, and the names that routers ask for in other servers.

Gauges of the gateway's state and of the queues are set when somebody scrapes: nothing keeps them current in between.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from services.common.adapters.registry import AdapterRegistry
from services.common.errors import TemperError
from services.common.queue.depth import QueueDepth
from services.common.queue.job_queue import JobQueue
from services.common.telemetry.process import installed_version
from services.common.telemetry.prometheus import expose
from services.gateway.api.base.routing import Routes, provided
from services.gateway.api.operations.engine_watch import EngineWatch
from services.gateway.api.responses.serving import BackgroundResponses
from services.gateway.auth.route_permissions import ANY_KEY, PUBLIC, Permission
from services.gateway.core.admission import Lifecycle
from services.gateway.core.file_store import StoreThreads
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.engines.client import EngineClient
from services.gateway.inference.context import InferenceContext

_FRESH_SECONDS = 5.0
_PATIENCE_SECONDS = 1.0
"""Longest time that a scrape waits for a frozen Redis."""


class Queue(Protocol):
    """Queue whose depth the gauges show."""

    async def depth(self) -> QueueDepth:
        """Depth of the queue. Raises Unavailable."""
        ...


class QueueWatch:
    """Sets the gauges of the queues. Used on the event loop only.

    Args:
        queues: by the name that the gauges have for them.
        metrics: has the gauges.
    """

    def __init__(self, queues: Mapping[str, Queue], metrics: GatewayMetrics) -> None:
        self._queues = queues
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._due = 0.0
        self.depths: Mapping[str, QueueDepth] = {}
        """Depths as last heard; empty: Redis did not answer."""

    async def refresh(self) -> None:
        """Asks the queues again if their last answer is old. While Redis is away there are no gauges of queues, rather
        than old ones."""
        async with self._lock:
            if time.monotonic() < self._due:
                return
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    self.depths = {name: await queue.depth() for name, queue in self._queues.items()}
            except (TemperError, TimeoutError):
                self.depths = {}
            self._show(self.depths)
            self._due = time.monotonic() + _FRESH_SECONDS

    def _show(self, depths: Mapping[str, QueueDepth]) -> None:
        series = self._metrics
        series.redis_up.set(bool(depths))
        for gauge in (series.jobs, series.dead_letters, series.oldest_queued):
            gauge.clear()
        for name, depth in depths.items():
            series.jobs.labels(name, "queued").set(depth.queued)
            series.jobs.labels(name, "running").set(depth.running)
            series.dead_letters.labels(name).set(depth.dead)
            series.oldest_queued.labels(name).set(depth.oldest_queued_seconds)


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of this process."""

    id: str = field(default_factory=lambda: secrets.token_hex(6))
    started: float = field(default_factory=time.time)
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class HealthServices:
    """Services whose state probes and scrapes ask for."""

    inference: InferenceContext
    lifecycle: Lifecycle
    queue: JobQueue
    queues: QueueWatch
    registry: AdapterRegistry
    """Registry of adapters. It blocks, so it is only called in ``threads``."""
    threads: StoreThreads
    background: BackgroundResponses
    engine: EngineWatch
    identity: Identity = field(default_factory=Identity)


Health = Annotated[HealthServices, provided(HealthServices)]


def _named(clients: Sequence[EngineClient]) -> dict[str, EngineClient]:
    """Engines by their own names. Addresses change with each restart on Kubernetes, so an engine goes by its address
    only if it has not said its name yet, or shares it with another."""
    names = [client.name for client in clients]
    return {
        name if name and names.count(name) == 1 else client.address: client
        for name, client in zip(names, clients, strict=True)
    }


async def refresh(health: HealthServices) -> None:
    """Sets every gauge of the gateway's state. Waits at most a second, for Redis or for an only engine."""
    series = health.inference.metrics
    clients = health.inference.engines.clients
    ready = sum(client.ready for client in clients)
    series.engines.labels("ready").set(ready)
    series.engines.labels("away").set(len(clients) - ready)
    series.ready.set(bool(ready) and not health.lifecycle.stopping.is_set())
    series.draining.set(health.lifecycle.stopping.is_set())
    series.breaker.clear()
    series.load.clear()
    for name, client in _named(clients).items():
        series.breaker.labels(name).set(client.breaker.state)
        series.load.labels(name).set(client.load)
    series.in_flight.set(health.inference.admission.in_flight)
    series.background.set(health.background.running)
    await asyncio.gather(health.queues.refresh(), health.engine.refresh())


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
