"""Series of other exporters that dashboards and alerts ask for, and the labels that a scrape adds to ours.

A name that is neither here nor exported by our code is a mistake (tests/unit/observability).
"""

from __future__ import annotations

from dataclasses import dataclass

TARGET = frozenset({"namespace", "pod", "release", "component"})
"""Labels that the chart's ServiceMonitors put on every series of ours."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """Exporter of another project."""

    source: str
    reference: str
    """Page that documents its series."""
    series: dict[str, frozenset[str]]
    """Labels of each series that are used here."""


_POD = frozenset({"namespace", "pod"})
_CONTAINER = _POD | {"container"}
_GPU = frozenset({"namespace", "Hostname", "gpu"})
_CLAIM = frozenset({"namespace", "persistentvolumeclaim"})

FOREIGN: tuple[Foreign, ...] = (
    Foreign(
        "prometheus_client, in our processes on Linux",
        "https://prometheus.github.io/client_python/collector/",
        dict.fromkeys(
            (
                "process_cpu_seconds_total",
                "process_resident_memory_bytes",
                "process_open_fds",
                "process_max_fds",
                "process_start_time_seconds",
                "process_virtual_memory_bytes",
            ),
            TARGET,
        ),
    ),
    Foreign(
        "Prometheus",
        "https://prometheus.io/docs/concepts/jobs_instances/",
        {"up": TARGET},
    ),
    Foreign(
        "kube-state-metrics",
        "https://github.com/kubernetes/kube-state-metrics/tree/main/docs/metrics/workload",
        {
            "kube_pod_container_status_restarts_total": _CONTAINER,
            "kube_pod_container_resource_limits": _CONTAINER | {"resource"},
            "kube_pod_status_ready": _POD | {"condition"},
        },
    ),
    Foreign(
        "kubelet",
        "https://kubernetes.io/docs/reference/instrumentation/metrics/",
        {"kubelet_volume_stats_available_bytes": _CLAIM, "kubelet_volume_stats_capacity_bytes": _CLAIM},
    ),
    Foreign(
        "cAdvisor",
        "https://github.com/google/cadvisor/blob/master/docs/storage/prometheus.md",
        {
            "container_cpu_cfs_throttled_periods_total": _CONTAINER,
            "container_cpu_cfs_periods_total": _CONTAINER,
        },
    ),
    Foreign(
        "NVIDIA's DCGM exporter",
        "https://github.com/NVIDIA/dcgm-exporter/blob/main/etc/default-counters.csv",
        {
            "DCGM_FI_DEV_GPU_UTIL": _GPU,
            "DCGM_FI_DEV_FB_USED": _GPU,
            "DCGM_FI_DEV_FB_FREE": _GPU,
            "DCGM_FI_DEV_POWER_USAGE": _GPU,
            "DCGM_FI_DEV_GPU_TEMP": _GPU,
            "DCGM_FI_DEV_XID_ERRORS": _GPU,
        },
    ),
)
