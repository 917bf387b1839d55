"""Facts of this process: the version of Temper, the memory that it may use, and metrics of both and of itself."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def installed_version() -> str:
    """Version of the installed package; "unknown" in a source tree that is not installed."""
    try:
        return version("temper")
    except PackageNotFoundError:
        return "unknown"


def machine_bytes() -> int:
    """Bytes of the machine's memory or the container's limit, the lower one."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no cgroup, or "max": no limit
        return total


def export_process(registry: CollectorRegistry, *, service: str) -> None:
    """Adds `temper_build_info{version,service}` and, on Linux, `process_*`: CPU seconds, memory, open files, start.

    Args:
        service: "gateway" or "engine".
    """
    build = Gauge("temper_build_info", "1: this version runs.", ("version", "service"), registry=registry)
    build.labels(installed_version(), service).set(1)
    ProcessCollector(registry=registry)
