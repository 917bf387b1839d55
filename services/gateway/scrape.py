"""Gauges that are set when somebody scrapes: nothing keeps them current in between."""

from __future__ import annotations

from services.gateway.state import Gateway


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
    for client in clients:
        series.breaker.labels(client.address).set(client.breaker.state)
        series.load.labels(client.address).set(client.load)
    series.in_flight.set(gateway.admission.taken)
    series.background.set(gateway.background.running)
    await gateway.queues.refresh()
