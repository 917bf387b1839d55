"""Every value of the chart said alone, with the least that it needs: what pairs are made of.

An axis of combinations.py says several values together, and a value is never tried without its company there: with
monitoring `gatewayFrom` rendered broken YAML wherever `monitoringFrom` was empty, and the axis says all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.chart.combinations import AXES, DIGEST, OUTSIDE, Values
from tests.chart.render import merged

_KEYS: Values = {"gateway": {"apiKeys": {"existingSecret": "keys"}}, "test": {"apiKeyExistingSecret": "test-key"}}
_STORE: Values = {"bundled": False, "external": {"endpoint": "s3.example.com:9000", "existingSecret": "s3"}}
_REDIS: Values = {"bundled": False, "external": {"existingSecret": "redis"}}
_HUB: Values = {"source": "huggingface", "digest": DIGEST, "huggingface": {"repository": "a/b"}}
_S3: Values = {"source": "s3", "digest": DIGEST, "s3": {"uri": "s3://a/b"}}
_ELSEWHERE: Values = merged(_S3, {"s3": {"endpoint": "s3.example.com", "existingSecret": "model"}})
_CLAIM: Values = {"source": "claim", "existingClaim": "c", "claimAccessMode": "ReadWriteMany"}
_SCALED: Values = {"enabled": True}
_NEEDS: Mapping[str, Values] = {
    "caBundle": {"caBundle": {"configMap": "authorities"}},
    "gateway.apiKeys": _KEYS,
    "gateway.ingress": {"gateway": {"ingress": {"enabled": True}, "apiKeys": {"allowNone": True}}},
    "gateway.httpRoute": {
        "gateway": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}, "apiKeys": {"allowNone": True}}
    },
    "gateway.service.type": {"gateway": {"apiKeys": {"allowNone": True}}},
    "gateway.autoscaling": {"gateway": {"autoscaling": _SCALED}},
    "engine.autoscaling": {"engine": {"autoscaling": _SCALED}},
    "inferencePool": {
        "engine": {"http": {"enabled": True}},
        "inferencePool": {"enabled": True, "endpointPicker": {"service": "epp"}},
    },
    "inferencePool.httpRoute": {
        "gateway": {"apiKeys": {"allowNone": True}},
        "inferencePool": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}},
    },
    "engine.http": {"engine": {"http": {"enabled": True}}},
    "engine.model.existingClaim": {"engine": {"model": _CLAIM}},
    "engine.model.claimAccessMode": {"engine": {"model": _CLAIM}},
    "engine.model.path": {"engine": {"model": _CLAIM}},
    "engine.model.s3": {"engine": {"model": _ELSEWHERE}},
    "engine.model.huggingface": {"engine": {"model": _HUB}},
    "engine.model.sharedClaim": {"engine": {"model": {**_HUB, "claimAccessMode": "ReadWriteMany"}}},
    "engine.model.digest": {"engine": {"model": _S3}},
    "engine.model.source": {"engine": {"model": {"existingClaim": "c", "claimAccessMode": "ReadWriteMany"}}},
    "engine.tiers": {"engine": {"tiers": {"names": "host,disk,store"}}},
    "engine.trainer.webhook": {"engine": {"trainer": {"webhooks": "https://a", "webhookExistingSecret": "w"}}},
    "redis.external": {"redis": _REDIS},
    "objectStore.external": {"objectStore": _STORE},
    "redis.bundled": {"redis": _REDIS},
    "objectStore.bundled": {"objectStore": _STORE},
    "tls": {"tls": {"enabled": True}},
    "tls.gatewayExistingSecret": {"tls": {"engineExistingSecret": "e"}},
    "tls.engineExistingSecret": {"tls": {"gatewayExistingSecret": "g"}},
    "telemetry": {"telemetry": {"otlpEndpoint": "http://collector:4317"}},
    "monitoring": {"monitoring": {"enabled": True}},
    "global.generateSecrets": {"redis": {"existingSecret": "r"}, "objectStore": {"existingSecret": "s"}},
    "networkPolicy.webhook": {"engine": {"trainer": {"webhooks": "https://a", "webhookExistingSecret": "w"}}},
}
"""Path, or its beginning → what has to be said with it."""

_SAID: Mapping[str, Any] = {
    "gateway.service.type": "LoadBalancer",
    "gateway.publicPaths": ["/v1/chat", "/v1/models"],
    "inferencePool.enabled": True,
    "inferencePool.endpointPicker.service": "epp",
    "inferencePool.endpointPicker.failureMode": "FailOpen",
    "inferencePool.objectives": [{"name": "chat", "priority": 1}],
    "inferencePool.httpRoute.parentRefs": [{"name": "g", "namespace": "n"}],
    "inferencePool.httpRoute.paths": ["/v1/messages"],
    "gateway.httpRoute.parentRefs": [{"name": "g", "namespace": "n"}],
    "engine.model.source": "claim",
    "engine.model.digest": "unchecked",
    "engine.model.s3.uri": "s3://c",
    "engine.model.s3.endpoint": "other.example.com:9000",
    "engine.model.huggingface.repository": "c/d@e",
    "engine.model.huggingface.endpoint": "http://hub.example.com",
    "engine.model.claimAccessMode": "ReadWriteMany",
    "engine.kvCacheDtype": "fp8",
    "engine.quantization": "int4",
    "engine.prefillFloat8": "mlp:0-15",
    "engine.gpu.resource": "nvidia.com/mig-1g.10gb",
    "engine.tiers.names": "disk",
    "engine.tiers.hostBytes": "1Gi",
    "engine.http.from": [{"podSelector": {}}],
    "engine.kvEvents.from": [{"podSelector": {}}],
    "engine.autoscaling.prometheus": "https://prometheus.example.com",
    "telemetry.traceRatio": 0.5,
    "engine.autoscaling.minReplicas": 0,
    "engine.autoscaling.scaler": "hpa",
    "engine.autoscaling.authenticationRef": {"name": "a", "kind": "TriggerAuthentication"},
    "engine.autoscaling.fallback.behavior": "static",
    "engine.trainer.sandbox": "landlock",
    "engine.trainer.webhooks": "https://grader.example.com:8443",
    "tls.certManager.issuerRef": {"name": "i", "kind": "Issuer"},
    "telemetry.otlpEndpoint": "https://collector.example.com",
    "objectStore.external.endpoint": "s3.example.com",
    "proxy.https": "http://proxy.example.com:3128",
    "proxy.http": "http://proxy.example.com:3128",
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine"}}],
    "monitoring.runbooksUrl": "https://wiki.example.com/runbooks",
    "networkPolicy.dnsPorts": [53, 5353],
}
"""Path → another value than the default's, where its kind does not say one."""

_BY_NAME: Mapping[str, Any] = {
    "credentials": "chain",
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "envFrom": [{"secretRef": {"name": "more"}}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "initContainers": [{"name": "first", "image": "registry.example.com/tools:1"}],
    "podSecurityContext": {"runAsUser": 4711},
    "securityContext": {"runAsUser": 4711},
    "podAnnotations": {"a": "b"},
    "podLabels": {"a": "b"},
    "annotations": {"a": "b"},
    "labels": {"a": "b"},
    "dashboardLabels": {"a": "b"},
    "prometheusMetadata": {"authModes": "bearer"},
    "nodeSelector": {"a": "b"},
    "affinity": {"podAntiAffinity": {}},
    "tolerations": [{"operator": "Exists"}],
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
    "env": {"TEMPER_LOG_LEVEL": "debug"},
    "digest": f"sha256:{DIGEST}",
    "pullPolicy": "Always",
    "device": "cpu",
    "timeout": "1h",
    "interval": "30s",
    "duration": "24h",
    "renewBefore": "8h",
    "tag": "1.2.3",
}
_EXCLUSIVE = {"credentials": {"existingSecret": ""}}


def fragments(defaults: Values) -> dict[str, Values]:
    """Path, or axis and choice → values that render alone."""
    found: dict[str, Values] = {}
    for path, default in _leaves(defaults):
        name = path.rpartition(".")[2]
        value = _SAID.get(path, _BY_NAME.get(name, _other(default, path)))
        needs = [needed for start, needed in _NEEDS.items() if path == start or path.startswith((f"{start}.", start))]
        said: Any = value
        if name in _EXCLUSIVE:
            needs = [*needs, _at(path.rpartition(".")[0], _EXCLUSIVE[name])]
        found[path] = merged(*needs, _at(path, said))
    for axis, choices in AXES.items():
        found |= {f"{axis}: {choice}": values for choice, values in choices.items() if values}
    return found


def _leaves(tree: Values, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        here = f"{path}.{key}" if path else key
        if isinstance(value, Mapping) and value and key not in ("requests", "limits", "dashboardLabels"):
            yield from _leaves(value, here)
        else:
            yield here, value


def _other(default: Any, path: str) -> Any:
    """A value of the same kind that is not the default."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1
    if isinstance(default, float):
        return default / 2
    if isinstance(default, Mapping):
        return {**default}
    if isinstance(default, list):
        if path.startswith("networkPolicy."):
            return [8443] if path.endswith("Ports") else OUTSIDE
        return ["other"]
    if path.endswith(("Seconds", "Size", "size", "Memory", "Bytes")):
        return "30Gi" if not path.endswith("Seconds") else 45
    return f"other.{path.rpartition('.')[2].lower()}"


def _at(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)
