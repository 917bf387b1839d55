"""Every series that the code exports, read from the real registries."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.common.pb import engine_pb2
from services.common.security.tls import Certificates
from services.engine.kv_cache.keys import Tier
from services.engine.kv_cache.memory_plan import MemoryPlan
from services.engine.observability.events import RequestDone
from services.engine.observability.exports import Sources, export
from services.engine.observability.metrics import EngineMetrics
from services.engine.observability.status import AdapterSnapshot, Counts, LoadedAdapter, LoopStatus, TierStatus
from services.engine.requests.adapter import BASE_PIN, AdapterPin
from services.engine.requests.outputs import Finished
from services.engine.requests.request import FinishReason, Request
from services.engine.requests.sampling_params import SamplingParams
from services.gateway.core.metrics import GatewayMetrics, LoopHistogram
from services.trainer.metrics import TrainerMetrics

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


@dataclass(frozen=True, slots=True)
class Exported:
    """Metric as its registry has it."""

    name: str
    """Name without the suffixes of its samples."""
    kind: str
    """Kind: counter, gauge or histogram."""
    labels: tuple[str, ...]
    text: str
    service: str
    """gateway, engine, or tls: of both, where they have certificates."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without infinity."""

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Names of the samples that queries ask for."""
        return tuple(self.name + suffix for suffix in _SUFFIXES[self.kind])

    def labels_of(self, sample: str) -> frozenset[str]:
        """Labels of one of ``sample_names``."""
        return frozenset({*self.labels, "le"}) if sample.endswith("_bucket") else frozenset(self.labels)


def exported() -> list[Exported]:
    """Everything that a gateway and an engine with a trainer export, by service and name.

    Without what prometheus_client says of a process, which depends on the system; see foreign.FOREIGN.
    """
    found = [
        *_read(_gateway(), "gateway"),
        *_read(_engine(), "engine"),
        *_read(_certificates(), "tls"),
    ]
    return sorted(found, key=lambda metric: (metric.service != "gateway", metric.name))


def _gateway() -> CollectorRegistry:
    """A gateway's registry, of one engine that has answered."""
    metrics = GatewayMetrics()
    metrics.engine.show(engine_pb2.Model(name="model"), engine_pb2.EngineStatus(block_size=16))
    return metrics.registry


def _certificates() -> CollectorRegistry:
    registry = CollectorRegistry()
    # What it exports does not depend on the files that it would read.
    Certificates.__new__(Certificates).export(registry)
    return registry


def _engine() -> CollectorRegistry:
    """An engine's registry with one of everything: what is made from other series shows its labels only in samples."""
    metrics = EngineMetrics(CollectorRegistry())
    request = Request("request", (1,), SamplingParams(max_tokens=1), BASE_PIN)
    finished = Finished(request, (1,), array("f", (0.0,)), FinishReason.STOP, 0, 0, 0.0, 0.0)
    metrics.listen(RequestDone(finished, 0.0, 0.0))
    TrainerMetrics(metrics.registry)
    counts = Counts(0, 0, 0, 0, 1, 0, 0, 1, 0)
    plan = MemoryPlan(
        budget=1, weights=1, workspace=0, states=0, adapters=0, kv=0, training=0, num_blocks=2, block_size=16
    )
    loaded = (LoadedAdapter(AdapterPin("a@1", "digest", 1), 0),)
    export(
        metrics,
        Sources(
            model_name="model",
            status=lambda: LoopStatus(counts, 0, True, True, 0, 0),
            adapters=lambda: AdapterSnapshot("a@1", loaded, ("a",)),
            training=lambda: False,
            adapter_slots=1,
            memory=plan,
            device_memory=lambda: {"total": 1, "reserved": 1, "allocated": 1},
            training_waited=lambda: 0.0,
            tiers=lambda: {Tier.HOST: TierStatus(0, 0, 1)},
        ),
    )
    return metrics.registry


def _read(registry: CollectorRegistry, service: str) -> Iterator[Exported]:
    # The library has no public way to see a metric whose labels have no values yet.
    for collector in tuple(registry._collector_to_names):
        if isinstance(collector, ProcessCollector):
            continue
        if isinstance(collector, MetricWrapperBase):
            (family,) = collector.describe()
            bounds = tuple(getattr(collector, "_upper_bounds", ()))
            yield _exported(family, service, tuple(collector._labelnames), bounds)
        elif isinstance(collector, LoopHistogram):
            (family,) = collector.collect()
            yield _exported(family, service, collector.label_names, collector.bounds)
        else:
            yield from _collected(collector, service)


def _collected(collector: Collector, service: str) -> Iterator[Exported]:
    for family in collector.collect():
        bounds = {float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels}
        labels = {label: None for sample in family.samples for label in sample.labels if label != "le"}
        yield _exported(family, service, tuple(labels), tuple(sorted(bounds)))


def _exported(family: Metric, service: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> Exported:
    finite = tuple(bound for bound in bounds if bound != float("inf"))
    return Exported(family.name, family.type, labels, family.documentation, service, finite)
