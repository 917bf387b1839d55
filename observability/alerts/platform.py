"""Processes, stores, memory and certificates."""

from __future__ import annotations

from observability.alerts.cases import ENGINE, GATEWAY, PLACE, fires, once, quiet, rising, series, steady
from observability.objectives import VOLUME_FREE
from observability.rules import Alert, Group
from observability.series import ANY_VOLUME, beside, ours
from observability.series import PLACE as BY

_ENGINES = 'component="engine"'
_GATEWAYS = 'component="gateway"'
_CONTAINERS = 'container=~"engine|gateway"'
_RESERVED, _TOTAL = 'kind="reserved"', 'kind="total"'
_GIVEN_UP = 'outcome="failed"'
_DAY = 86400
_POD = {"namespace": "temper", "pod": "r-engine-0", "container": "engine"}
_PVC = {"namespace": "temper", "persistentvolumeclaim": "r-models"}


def _up(labels: dict[str, str], component: str, values: str) -> dict[str, str]:
    return {series("up", labels, component=component): values}


def _memory(reserved: float) -> dict[str, str]:
    name = "temper_engine_device_memory_bytes"
    return {series(name, ENGINE, kind="reserved"): steady(reserved), series(name, ENGINE, kind="total"): steady(100)}


def _volume(free: float) -> dict[str, str]:
    return {
        series("kubelet_volume_stats_available_bytes", _PVC): steady(free),
        series("kubelet_volume_stats_capacity_bytes", _PVC): steady(100),
    }


def _counted(name: str, values: str) -> dict[str, str]:
    return {series(name, GATEWAY): values}


def _webhook(outcome: str) -> str:
    return series("temper_gateway_webhook_deliveries_total", GATEWAY, outcome=outcome)


PLATFORM = Group(
    "platform",
    (
        Alert(
            "TemperEngineDown",
            f"{ours('up', _ENGINES)} == 0",
            5,
            "critical",
            "An engine is down",
            "{{ $labels.pod }} does not answer Prometheus: its process is gone, starts, or hangs.",
            (
                fires(_up(ENGINE, "engine", steady(0)), "10m", {**ENGINE, "component": "engine"}),
                quiet(_up(ENGINE, "engine", steady(1)), "10m"),
                quiet(_up(ENGINE, "engine", "1x5 0x3 1x20"), "10m"),
            ),
        ),
        Alert(
            "TemperGatewayDown",
            f"max by ({BY}, component) ({ours('up', _GATEWAYS)}) == 0\nor absent({ours('up', _GATEWAYS)})",
            2,
            "critical",
            "No gateway answers",
            "Prometheus reaches no gateway: clients probably do not either.",
            (
                fires(_up(GATEWAY, "gateway", steady(0)), "5m", {**PLACE, "component": "gateway"}),
                fires({}, "5m", {"component": "gateway"}),
                quiet(_up(GATEWAY, "gateway", steady(1)), "5m"),
            ),
        ),
        Alert(
            "TemperRestarts",
            f"sum by (namespace, pod, container) "
            f"(increase({beside('kube_pod_container_status_restarts_total', _CONTAINERS)}[30m])) > 2",
            0,
            "warning",
            "A container restarts again and again",
            "{{ $labels.container }} of {{ $labels.pod }} restarted several times in the last half hour.",
            (
                fires(
                    {series("kube_pod_container_status_restarts_total", _POD): rising(1)},
                    "30m",
                    _POD,
                ),
                quiet({series("kube_pod_container_status_restarts_total", _POD): once(0, 5, 1)}, "30m"),
            ),
        ),
        Alert(
            "TemperRedisAway",
            f"min by ({BY}) ({ours('temper_gateway_redis_up')}) == 0\n"
            f"or min by ({BY}) ({ours('temper_gateway_quota_shared')}) == 0",
            5,
            "critical",
            "Gateways do not reach Redis",
            "Jobs, batches and stored responses of release {{ $labels.release }} are refused, and each gateway counts "
            "the limits of keys alone. Chats go on.",
            (
                fires(_counted("temper_gateway_redis_up", steady(0)), "10m", PLACE),
                fires(_counted("temper_gateway_quota_shared", steady(0)), "10m", PLACE),
                quiet(
                    {
                        **_counted("temper_gateway_redis_up", steady(1)),
                        **_counted("temper_gateway_quota_shared", steady(1)),
                    },
                    "10m",
                ),
            ),
        ),
        Alert(
            "TemperAuditFails",
            f"increase({ours('temper_gateway_audit_failures_total')}[15m]) > 0",
            0,
            "critical",
            "The audit log loses lines",
            "{{ $labels.pod }} could not write to the audit log: what was changed is only in its ordinary log.",
            (
                fires(_counted("temper_gateway_audit_failures_total", once(0, 5, 1)), "10m", GATEWAY),
                quiet(_counted("temper_gateway_audit_failures_total", steady(1)), "10m"),
            ),
        ),
        Alert(
            "TemperWebhooksFail",
            f"sum by ({BY}) (increase({ours('temper_gateway_webhook_deliveries_total', _GIVEN_UP)}[1h])) > 0",
            0,
            "warning",
            "An event was given up for a webhook",
            "Every attempt of release {{ $labels.release }} to tell a webhook of an end has failed: "
            "temper webhooks list --state failed has which.",
            (
                fires({_webhook("failed"): once(0, 5, 1)}, "10m", PLACE),
                quiet({_webhook("retried"): once(0, 5, 1)}, "10m"),
            ),
        ),
        Alert(
            "TemperKeyFileRefused",
            f"increase({ours('temper_gateway_api_key_reload_failures_total')}[15m]) > 0",
            0,
            "warning",
            "A new key file could not be used",
            "{{ $labels.pod }} goes on with the keys from before: a key that was revoked in the new file still works.",
            (
                fires(_counted("temper_gateway_api_key_reload_failures_total", once(0, 5, 1)), "10m", GATEWAY),
                quiet(_counted("temper_gateway_api_key_reload_failures_total", steady(2)), "10m"),
            ),
        ),
        Alert(
            "TemperGpuMemoryLow",
            f"{ours('temper_engine_device_memory_bytes', _RESERVED)}\n"
            f"/ ignoring (kind) {ours('temper_engine_device_memory_bytes', _TOTAL)} > 0.97",
            15,
            "warning",
            "The GPU's memory is nearly used up",
            "The engine {{ $labels.pod }} has reserved {{ $value | humanizePercentage }} of the card: a step or a "
            "training job may run out.",
            (
                fires(_memory(98), "30m", ENGINE, "98%"),
                quiet(_memory(92), "30m"),
            ),
        ),
        Alert(
            "TemperCertificateEnds",
            f"min by ({BY}, pod) ({ours('temper_tls_certificate_expiry_timestamp_seconds')}) - time() < {7 * _DAY}",
            60,
            "warning",
            "A certificate between gateways and engines ends soon",
            "The certificate of {{ $labels.pod }} ends in {{ $value | humanizeDuration }}; then no engine is reached.",
            (
                fires(
                    {series("temper_tls_certificate_expiry_timestamp_seconds", GATEWAY): steady(2 * _DAY + 4800)},
                    "80m",
                    GATEWAY,
                    "2d 0h 0m 0s",
                ),
                quiet({series("temper_tls_certificate_expiry_timestamp_seconds", GATEWAY): steady(30 * _DAY)}, "80m"),
            ),
        ),
        Alert(
            "TemperVolumeFull",
            f"{beside('kubelet_volume_stats_available_bytes', ANY_VOLUME)}\n"
            f"/ {beside('kubelet_volume_stats_capacity_bytes', ANY_VOLUME)} < {VOLUME_FREE}",
            15,
            "warning",
            "A volume is nearly full",
            "{{ $value | humanizePercentage }} of {{ $labels.persistentvolumeclaim }} is free.",
            (
                fires(_volume(5), "20m", _PVC, "5%"),
                quiet(_volume(50), "20m"),
            ),
        ),
    ),
)
