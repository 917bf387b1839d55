"""Gauges that are set when somebody scrapes: nothing keeps them current in between."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.context import Gateway
from services.gateway.engines.client import EngineClient


def _named(clients: Sequence[EngineClient]) -> dict[str, EngineClient]:
    """Engines by what they call themselves. An address is another after each restart on Kubernetes: it is taken only of
    one that has not said its name yet, or that shares it."""
    names = [client.name for client in clients]
    return {
        name if name and names.count(name) == 1 else client.address: client
        for name, client in zip(names, clients, strict=True)
    }


async def refresh(gateway: Gateway) -> None:
    """Sets every gauge of the gateway's state. Waits at most a second, for Redis."""
    series = gateway.metrics
    clients = gateway.engines.clients
    ready = sum(client.ready for client in clients)
    series.engines.labels("ready").set(ready)
    series.engines.labels("away").set(len(clients) - ready)
    series.ready.set(bool(ready) and not gateway.stopping.is_set())
    series.draining.set(gateway.stopping.is_set())
    series.breaker.clear()
    series.load.clear()
    for name, client in _named(clients).items():
        series.breaker.labels(name).set(client.breaker.state)
        series.load.labels(name).set(client.load)
    series.in_flight.set(gateway.admission.taken)
    series.background.set(gateway.background.running)
    await gateway.queues.refresh()
