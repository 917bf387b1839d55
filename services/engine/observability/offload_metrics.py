"""Metrics of the prefix cache's tiers: hits and the time that they save, copies, failures, and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.engine.kv_cache.keys import Tier
from services.engine.observability.events import CopyEvent, CopyEvicted, CopyFailure, CopyLoaded, CopyNotMade, CopySaved
from services.engine.observability.status import TierStatus

_DEVICE = "device"
_BELOW = tuple(tier.value for tier in Tier)
_ALL = (_DEVICE, *_BELOW)
_COPIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class TierMetrics:
    """Metrics of the tiers, counted where an event is emitted, on any thread.

    Every series is present from the start, at zero: Prometheus does not see the first increase of a new series.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._hits = Counter(
            "temper_engine_cache_hit_tokens",
            "Prompt tokens from the prefix cache, by where they were: device, host, disk, store.",
            ["tier"],
            registry=registry,
        )
        self._saved = Counter(
            "temper_engine_cache_saved_seconds",
            "Computing that hits have saved, less the time of their loads.",
            ["tier"],
            registry=registry,
        )
        self._loaded_bytes = Counter(
            "temper_engine_tier_loaded_bytes", "Bytes read from a tier to the device.", ["tier"], registry=registry
        )
        self._load = Histogram(
            "temper_engine_tier_load_seconds",
            "Duration of a load from a tier to the device.",
            ["tier"],
            registry=registry,
            buckets=_COPIES,
        )
        self._saved_bytes = Counter(
            "temper_engine_tier_saved_bytes", "Bytes written to a tier.", ["tier"], registry=registry
        )
        self._save = Histogram(
            "temper_engine_tier_save_seconds",
            "Duration of writing an entry to a tier.",
            ["tier"],
            registry=registry,
            buckets=_COPIES,
        )
        self._failures = Counter(
            "temper_engine_tier_failures",
            "Copies that could not be read or written: damaged, missing, unreadable, full, slow, away, late.",
            ["tier", "reason"],
            registry=registry,
        )
        self._evicted = Counter(
            "temper_engine_cache_evicted_bytes", "Bytes given up for others.", ["tier"], registry=registry
        )
        for tier in _ALL:
            for counter in (self._hits, self._saved, self._evicted):
                counter.labels(tier)
        for tier in _BELOW:
            for metric in (self._loaded_bytes, self._load, self._saved_bytes, self._save):
                metric.labels(tier)
            for reason in get_args(CopyFailure):
                self._failures.labels(tier, reason)

    def listen(self, event: CopyEvent) -> None:
        """Counts an event of a tier."""
        match event:
            case CopyLoaded(tier, size, seconds):
                self._loaded_bytes.labels(tier.value).inc(size)
                self._load.labels(tier.value).observe(seconds)
            case CopySaved(tier, size, seconds):
                self._saved_bytes.labels(tier.value).inc(size)
                self._save.labels(tier.value).observe(seconds)
            case CopyNotMade(tier, reason):
                self._failures.labels(tier.value, reason).inc()
            case CopyEvicted(tier, size):
                self.evicted(tier, size)

    def hit(self, tier: Tier | None, tokens: int, seconds: float) -> None:
        """Counts prompt tokens that came from a tier (None: from the device), and the computing that this saved, less
        the load."""
        self._hits.labels(_name(tier)).inc(tokens)
        # A load that took longer than computing has saved nothing; a counter cannot fall.
        self._saved.labels(_name(tier)).inc(max(0.0, seconds))

    def evicted(self, tier: Tier | None, size: int) -> None:
        """Counts evicted bytes; None: on the device."""
        self._evicted.labels(_name(tier)).inc(size)


class TierCollector(Collector):
    """Gauges of the tiers that there are, read when somebody scrapes.

    Args:
        status: returns the status of each tier; fast, thread-safe and without I/O.
    """

    def __init__(self, status: Callable[[], Mapping[Tier, TierStatus]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Metrics for the registry."""
        entries = GaugeMetricFamily("temper_engine_tier_entries", "Entries in a tier.", labels=["tier"])
        size = GaugeMetricFamily("temper_engine_tier_bytes", "Bytes in a tier.", labels=["tier"])
        limit = GaugeMetricFamily("temper_engine_tier_limit_bytes", "Bytes that a tier may have.", labels=["tier"])
        for tier, status in self._status().items():
            entries.add_metric([tier.value], status.entries)
            size.add_metric([tier.value], status.size)
            limit.add_metric([tier.value], status.limit)
        yield from (entries, size, limit)


def _name(tier: Tier | None) -> str:
    return _DEVICE if tier is None else tier.value
