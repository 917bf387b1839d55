"""Gauges that are set when somebody scrapes: nothing keeps them current in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from services.common.adapters.registry import AdapterRegistry
from services.common.queue.job_queue import JobQueue
from services.gateway.api.base.dependencies import provided
from services.gateway.api.health.queue_gauges import QueueWatch
from services.gateway.api.responses.background import BackgroundResponses
from services.gateway.core.admission import Lifecycle
from services.gateway.core.file_store import StoreThreads
from services.gateway.engines.client import EngineClient
from services.gateway.inference.context import InferenceContext


@dataclass(frozen=True, slots=True)
class HealthServices:
    """Everything whose state probes and scrapes ask for."""

    inference: InferenceContext
    lifecycle: Lifecycle
    queue: JobQueue
    queues: QueueWatch
    registry: AdapterRegistry
    """Blocking, so only called in ``threads``."""
    threads: StoreThreads
    background: BackgroundResponses


Health = Annotated[HealthServices, provided(HealthServices)]


def _named(clients: Sequence[EngineClient]) -> dict[str, EngineClient]:
    """Engines by what they call themselves. An address is another after each restart on Kubernetes: it is taken only of
    one that has not said its name yet, or that shares it."""
    names = [client.name for client in clients]
    return {
        name if name and names.count(name) == 1 else client.address: client
        for name, client in zip(names, clients, strict=True)
    }


async def refresh(health: HealthServices) -> None:
    """Sets every gauge of the gateway's state. Waits at most a second, for Redis."""
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
    await health.queues.refresh()
