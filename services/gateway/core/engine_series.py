"""Series of the engine of a gateway that serves one engine, for endpoint pickers, which scrape the port of the API."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.common.pb import engine_pb2
from services.common.telemetry.router_series import adapter_series, cache_series, load_series


class EngineSeries(Collector):
    """Collector of what the engine said last. There are no series of an engine that does not answer: old or zero ones
    would draw requests to it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._said: tuple[engine_pb2.Model, engine_pb2.EngineStatus] | None = None
        registry.register(self)

    def show(self, model: engine_pb2.Model, status: engine_pb2.EngineStatus) -> None:
        """Shows this status of an engine that serves this model."""
        self._said = model, status

    def clear(self) -> None:
        """Shows nothing."""
        self._said = None

    def collect(self) -> Iterator[Metric]:
        """Metrics for the registry."""
        if self._said is None:
            return
        model, status = self._said
        used_share = status.blocks_used / max(status.blocks_total, 1)
        yield from load_series(model.name, status.running, status.waiting, used_share)
        if status.block_size:  # an engine of an earlier release says neither
            yield adapter_series(model.adapter_slots, status.serving_adapters, status.waiting_adapters)
            yield cache_series(status.block_size, status.blocks_total)
