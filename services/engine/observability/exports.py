"""Exported gauges of an engine process, read at each scrape by the scrape's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.engine.kv_cache.keys import Tier
from services.engine.kv_cache.memory_plan import MemoryPlan
from services.engine.observability.metrics import EngineMetrics, StateCollector
from services.engine.observability.offload_metrics import TierCollector
from services.engine.observability.status import AdapterSnapshot, LoopStatus, TierStatus
from services.engine.observability.vllm_metrics import VllmCollector


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of the values; every callable is fast, thread-safe and does no I/O."""

    model_name: str
    status: Callable[[], LoopStatus]
    adapters: Callable[[], AdapterSnapshot]
    training: Callable[[], bool]
    """Tells whether a training job runs."""
    adapter_slots: int
    memory: MemoryPlan
    device_memory: Callable[[], Mapping[str, int]]
    """Present bytes of the device by kind; {} where only the plan is known."""
    training_waited: Callable[[], float]
    """Returns the seconds that the trainer has waited for its turns."""
    tiers: Callable[[], Mapping[Tier, TierStatus]] = dict
    """Returns the tiers below the device; {}: there are none."""


def export(metrics: EngineMetrics, sources: Sources) -> None:
    """Registers the collectors in the registry of ``metrics``."""
    registry = metrics.registry
    registry.register(
        StateCollector(sources.model_name, sources.status, sources.adapters, sources.training, sources.adapter_slots)
    )
    registry.register(
        VllmCollector(metrics, sources.status, model_name=sources.model_name, block_size=sources.memory.block_size)
    )
    registry.register(_DeviceCollector(sources))
    registry.register(TierCollector(sources.tiers))


class _DeviceCollector(Collector):
    """Collector of the device's memory by owner, and of the trainer's wait for its turns."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """Metrics for the registry."""
        plan = self._sources.memory
        planned = GaugeMetricFamily(
            "temper_engine_memory_plan_bytes",
            "What the memory plan gives to each owner; free is what it leaves.",
            labels=["owner"],
        )
        for owner, size in plan.shares().items():
            planned.add_metric([owner], size)
        yield planned
        device = GaugeMetricFamily(
            "temper_engine_device_memory_bytes",
            "Memory of the GPU: total, reserved by this process' allocator, allocated of that. None on a CPU.",
            labels=["kind"],
        )
        for kind, size in self._sources.device_memory().items():
            device.add_metric([kind], size)
        yield device
        yield CounterMetricFamily(
            "temper_trainer_gate_wait_seconds",
            "Seconds that the trainer waited for its turns to compute.",
            value=self._sources.training_waited(),
        )
