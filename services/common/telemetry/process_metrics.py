"""Metrics that every process of Temper has about itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector

from services.common.telemetry.version import installed_version


def export_process(registry: CollectorRegistry, *, service: str) -> None:
    """Adds `temper_build_info{version,service}` and, on Linux, `process_*`: CPU seconds, memory, open files, start.

    Args:
        service: "gateway" or "engine".
    """
    build = Gauge("temper_build_info", "1: this version runs.", ("version", "service"), registry=registry)
    build.labels(installed_version(), service).set(1)
    ProcessCollector(registry=registry)
