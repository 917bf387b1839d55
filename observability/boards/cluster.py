"""Cluster dashboard: processes, pods, GPUs and nodes."""

from __future__ import annotations

from observability.board import Board, Panel, Query, Row
from observability.series import around, chosen, everywhere, rate, total

_CONTAINERS = 'container=~"engine|gateway"'
_OURS = 'component=~"engine|gateway"'
_TRUE = 'condition="true"'
_POD = 'pod=~"$pod"'

_GLANCE = Row(
    "At a glance",
    (
        Panel(
            "Gateways ready",
            "Gateways that can serve completions now.",
            (Query(total(everywhere("temper_gateway_ready"))),),
            kind="number",
            width=4,
            base="red",
            steps=((1, "green"),),
            alerts=("TemperGatewayDown",),
        ),
        Panel(
            "Engines ready",
            "Engines that accept requests now.",
            (Query(total(everywhere("temper_engine_ready"))),),
            kind="number",
            width=4,
            base="red",
            steps=((1, "green"),),
            alerts=("TemperEngineDown",),
        ),
        Panel(
            "Draining",
            "Processes that finish what they have and take nothing new.",
            (
                Query(
                    f"(sum({everywhere('temper_gateway_draining')}) or vector(0)) + "
                    f"(sum({everywhere('temper_engine_draining')}) or vector(0))"
                ),
            ),
            kind="number",
            width=4,
            base="blue",
        ),
        Panel(
            "Restarts",
            "Of containers, in the last hour.",
            (Query(f"sum(increase({around('kube_pod_container_status_restarts_total', _CONTAINERS)}[1h]))"),),
            kind="number",
            width=4,
            decimals=0,
            steps=((1, "yellow"), (4, "red")),
            alerts=("TemperRestarts",),
        ),
        Panel(
            "Redis",
            "Whether every gateway's last look at Redis had an answer.",
            (Query(f"min({everywhere('temper_gateway_redis_up')})"),),
            kind="number",
            width=4,
            base="red",
            steps=((1, "green"),),
            alerts=("TemperRedisAway",),
        ),
        Panel(
            "Certificates end in",
            "The first TLS certificate between gateways and engines to end; nothing without mTLS.",
            (Query(f"min({everywhere('temper_tls_certificate_expiry_timestamp_seconds')}) - time()"),),
            kind="number",
            unit="dtdurations",
            width=4,
            base="red",
            steps=((7 * 86400, "yellow"), (21 * 86400, "green")),
            alerts=("TemperCertificateEnds",),
        ),
    ),
)

_GPU = Row(
    "GPU",
    (
        Panel(
            "Memory by owner",
            "How the memory plan divides an engine's GPU; free is what the plan leaves.",
            (Query(total(chosen("temper_engine_memory_plan_bytes"), "owner"), "{{owner}}"),),
            kind="stack",
            unit="bytes",
            low=0,
        ),
        Panel(
            "Memory of the process",
            "Reserved by each engine's allocator, allocated of that, and the card's total.",
            (Query(chosen("temper_engine_device_memory_bytes"), "{{pod}} {{kind}}"),),
            unit="bytes",
            low=0,
            alerts=("TemperGpuMemoryLow",),
        ),
        Panel(
            "Utilization",
            "Share of time that the GPU computes, from NVIDIA's exporter.",
            (Query(f"{around('DCGM_FI_DEV_GPU_UTIL')} / 100", "{{Hostname}} {{gpu}}"),),
            unit="percentunit",
            low=0,
            high=1,
        ),
        Panel(
            "Memory of the card",
            "In use by all processes, from NVIDIA's exporter.",
            (
                Query(f"{around('DCGM_FI_DEV_FB_USED')} * 1048576", "{{Hostname}} {{gpu}} used"),
                Query(f"{around('DCGM_FI_DEV_FB_FREE')} * 1048576", "{{Hostname}} {{gpu}} free"),
            ),
            kind="stack",
            unit="bytes",
            low=0,
            alerts=("TemperGpuMemoryLow",),
        ),
        Panel(
            "Power and temperature",
            "Of the card. A hot one computes slower.",
            (
                Query(around("DCGM_FI_DEV_POWER_USAGE"), "{{Hostname}} {{gpu}} W"),
                Query(around("DCGM_FI_DEV_GPU_TEMP"), "{{Hostname}} {{gpu}} °C"),
            ),
            low=0,
        ),
        Panel(
            "Xid errors",
            "The driver's last error number by GPU; NVIDIA's table of Xid errors says what each means.",
            (Query(around("DCGM_FI_DEV_XID_ERRORS"), "{{Hostname}} {{gpu}}"),),
            low=0,
        ),
    ),
)

_PODS = Row(
    "Processes",
    (
        Panel(
            "Versions",
            "What runs where.",
            (Query(f"max by (pod, service, version) ({chosen('temper_build_info')})"),),
            kind="table",
        ),
        Panel(
            "CPU",
            "Cores that each process uses. A gateway is one process on one core: at 1 it is full.",
            (Query(rate(chosen("process_cpu_seconds_total", _OURS)), "{{pod}}"),),
            low=0,
        ),
        Panel(
            "Memory",
            "Resident memory of each process, and its container's limit.",
            (
                Query(chosen("process_resident_memory_bytes", _OURS), "{{pod}}"),
                Query(
                    around("kube_pod_container_resource_limits", _CONTAINERS, 'resource="memory"', _POD),
                    "{{pod}} limit",
                ),
            ),
            unit="bytes",
            low=0,
        ),
        Panel(
            "Open files",
            "Sockets count: a stream is one.",
            (
                Query(
                    f"{chosen('process_open_fds', _OURS)} / {chosen('process_max_fds', _OURS)}",
                    "{{pod}}",
                ),
            ),
            unit="percentunit",
            low=0,
            high=1,
        ),
        Panel(
            "Pods not ready",
            "By pod; longer than a start takes is a fault.",
            (
                Query(
                    f"1 - max by (pod) ({around('kube_pod_status_ready', _TRUE, _POD)})",
                    "{{pod}}",
                ),
            ),
            low=0,
            high=1,
            alerts=("TemperEngineDown", "TemperGatewayDown"),
        ),
        Panel(
            "Throttled",
            "Share of a container's periods in which its CPU limit stopped it: tokens come late.",
            (
                Query(
                    f"{total(rate(around('container_cpu_cfs_throttled_periods_total', _CONTAINERS)), 'pod')} / "
                    f"{total(rate(around('container_cpu_cfs_periods_total', _CONTAINERS)), 'pod')}",
                    "{{pod}}",
                ),
            ),
            unit="percentunit",
            low=0,
            high=1,
        ),
    ),
)

_STORES = Row(
    "Stores and security",
    (
        Panel(
            "Volumes",
            "Share in use, from the kubelet: models, kernels, Redis, objects.",
            (
                Query(
                    f"1 - {around('kubelet_volume_stats_available_bytes')} / "
                    f"{around('kubelet_volume_stats_capacity_bytes')}",
                    "{{persistentvolumeclaim}}",
                ),
            ),
            unit="percentunit",
            low=0,
            high=1,
            steps=((0.9, "red"),),
            alerts=("TemperVolumeFull",),
        ),
        Panel(
            "Limits of keys",
            "1: gateways count limits together in Redis; 0: each alone.",
            (Query(chosen("temper_gateway_quota_shared"), "{{pod}}"),),
            low=0,
            high=1,
            alerts=("TemperRedisAway",),
        ),
        Panel(
            "Keys and the audit log",
            "Valid keys, key files that could not be read, and audit lines that could not be written.",
            (
                Query(f"max({everywhere('temper_gateway_api_keys')})", "keys"),
                Query(f"sum(increase({chosen('temper_gateway_api_key_reload_failures_total')}[1h]))", "bad key files"),
                Query(f"sum(increase({chosen('temper_gateway_audit_failures_total')}[1h]))", "lost audit lines"),
            ),
            low=0,
            alerts=("TemperAuditFails", "TemperKeyFileRefused"),
        ),
        Panel(
            "Webhooks",
            "Attempts to deliver events, by outcome; failed ones are given up.",
            (
                Query(
                    f"sum by (outcome) (increase({chosen('temper_gateway_webhook_deliveries_total')}[5m]))",
                    "{{outcome}}",
                ),
            ),
            low=0,
            alerts=("TemperWebhooksFail",),
        ),
    ),
)

CLUSTER = Board(
    "cluster",
    "Temper / Cluster",
    "Processes and pods, GPUs, volumes, and what needs care before it fails.",
    (_GLANCE, _GPU, _PODS, _STORES),
)
