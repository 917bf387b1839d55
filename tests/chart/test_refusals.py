"""Values that cannot work are refused before anything is installed, with the name of the value to change."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import helm_python
import pytest

from tests.chart.conftest import DEFAULTS
from tests.chart.render import CHART, OURS, merged, render, values_file

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
EXTERNAL_REDIS = {"redis": {"bundled": False}}
BY_IDENTITY = {"bundled": False, "external": {"endpoint": "h", "credentials": "chain"}}

POOL = {
    "engine": {"http": {"enabled": True}},
    "inferencePool": {"enabled": True, "endpointPicker": {"service": "epp"}},
}

REFUSED: tuple[tuple[Mapping[str, Any], str], ...] = (
    (EXTERNAL_REDIS, "redis.external.existingSecret is not set"),
    ({"objectStore": {"bundled": False}}, "objectStore.external.endpoint is not set"),
    (
        {"objectStore": {"bundled": False, "external": {"endpoint": "s3.example.com"}}},
        "objectStore.external.existingSecret is not set",
    ),
    ({"engine": {"model": {"source": "claim"}}}, "engine.model.existingClaim is not set"),
    (
        {"engine": {"replicas": 2, "model": {"source": "claim", "existingClaim": "c"}}},
        "engine.model.existingClaim (c) is to be mounted by 2 engines, and its access mode is not known",
    ),
    (
        {
            "engine": {
                "autoscaling": {"enabled": True, "maxReplicas": 3},
                "model": {"source": "claim", "existingClaim": "c", "claimAccessMode": "ReadWriteOnce"},
            }
        },
        "engine.model.existingClaim (c) is to be mounted by 3 engines, and its access mode is ReadWriteOnce: "
        "ReadOnlyMany or ReadWriteMany lets",
    ),
    (
        {
            "engine": {
                "replicas": 2,
                "model": {
                    "source": "huggingface",
                    "digest": "unchecked",
                    "huggingface": {"repository": "a/b"},
                    "sharedClaim": "s",
                    "claimAccessMode": "ReadOnlyMany",
                },
            }
        },
        "engine.model.sharedClaim (s) is to be mounted by 2 engines, and its access mode is ReadOnlyMany: "
        "ReadWriteMany lets",
    ),
    ({"engine": {"model": {"source": "s3"}}}, "engine.model.s3.uri is not set"),
    ({"engine": {"model": {"source": "s3", "s3": {"uri": "s3://a/b"}}}}, "engine.model.digest is not set"),
    (
        {"engine": {"model": {"source": "s3", "digest": "unchecked", "s3": {"uri": "s3://a", "endpoint": "h:9000"}}}},
        "engine.model.s3.existingSecret is not set",
    ),
    ({"engine": {"model": {"source": "huggingface"}}}, "engine.model.huggingface.repository is not set"),
    (
        {"engine": {"model": {"source": "huggingface", "huggingface": {"repository": "Qwen/Qwen3.5-4B"}}}},
        "engine.model.digest is not set",
    ),
    ({"engine": {"device": "cpu", "quantization": "fp8"}}, "engine.quantization needs a GPU"),
    ({"engine": {"device": "cpu", "kvCacheDtype": "fp8"}}, "engine.kvCacheDtype needs a GPU"),
    ({"engine": {"quantization": "fp8", "prefillFloat8": "mlp"}}, "engine.prefillFloat8 is for weights that are not"),
    ({"engine": {"trainer": {"webhooks": "https://a"}}}, "engine.trainer.webhookExistingSecret is not set"),
    ({"engine": {"autoscaling": {"enabled": True, "minReplicas": 9}}}, "engine.autoscaling.minReplicas is over"),
    (
        {"engine": {"autoscaling": {"enabled": True, "scaler": "hpa", "minReplicas": 0}}},
        "engine.autoscaling.minReplicas is 0, to which a HorizontalPodAutoscaler does not scale",
    ),
    ({"gateway": {"autoscaling": {"enabled": True, "minReplicas": 9}}}, "gateway.autoscaling.minReplicas is over"),
    ({"gateway": {"httpRoute": {"enabled": True}}}, "gateway.httpRoute.parentRefs is empty"),
    ({"telemetry": {"headersExistingSecret": "x"}}, "telemetry.headersExistingSecret does nothing"),
    (
        {"tls": {"enabled": True, "gatewayExistingSecret": "x"}},
        "tls.gatewayExistingSecret and tls.engineExistingSecret",
    ),
    ({"engine": {"env": {"TEMPER_DRAIN_SECONDS": 5}}}, "env.TEMPER_DRAIN_SECONDS is set by the chart"),
    ({"gateway": {"env": {"TEMPER_ENGINES": "x:1"}}}, "env.TEMPER_ENGINES is set by the chart"),
    ({"env": {"TEMPER_S3_BUCKET": "x"}}, "env.TEMPER_S3_BUCKET is set by the chart"),
    ({"env": {"TEMPER_REDIS_URL": "redis://x"}}, "env.TEMPER_REDIS_URL is set by the chart"),
    ({"engine": {"extraEnv": [{"name": "TEMPER_DEVICE"}]}}, "extraEnv: TEMPER_DEVICE is set by the chart"),
    ({"gateway": {"image": {"registry": ""}}}, "gateway.image.registry is empty"),
    ({"engine": {"image": {"registry": ""}}}, "engine.image.registry is empty"),
    ({"gateway": {"service": {"type": "LoadBalancer"}}}, "gateway.service.type is LoadBalancer and"),
    ({"gateway": {"service": {"type": "NodePort"}}}, "gateway.service.type is NodePort and"),
    ({"gateway": {"ingress": {"enabled": True}}}, "gateway.ingress.enabled is true and"),
    (
        {"gateway": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}}},
        "gateway.httpRoute.enabled is true and",
    ),
    ({"inferencePool": {"enabled": True}}, "inferencePool.enabled is true and engine.http.enabled is not"),
    (
        {"engine": {"http": {"enabled": True}}, "inferencePool": {"enabled": True}},
        "inferencePool.endpointPicker.service is not set",
    ),
    (merged(POOL, {"inferencePool": {"httpRoute": {"enabled": True}}}), "inferencePool.httpRoute.parentRefs is empty"),
    (
        merged(POOL, {"inferencePool": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}}}),
        "inferencePool.httpRoute.enabled is true and",
    ),
    ({"inferencePool": {"httpRoute": {"enabled": True}}}, "inferencePool.httpRoute.enabled does nothing without"),
    ({"inferencePool": {"objectives": [{"name": "a", "priority": 1}]}}, "inferencePool.objectives do nothing without"),
    ({"gateway": {"apiKeys": {"existingSecret": "keys"}}}, "test.apiKeyExistingSecret is not set"),
    ({"global": {"generateSecrets": False}}, "redis.existingSecret is not set"),
    (
        {"global": {"generateSecrets": False}, "redis": {"existingSecret": "r"}},
        "objectStore.existingSecret is not set",
    ),
    (
        {"redis": {"bundled": False, "existingSecret": "r", "external": {"existingSecret": "u"}}},
        "redis.existingSecret is of the bundled Redis",
    ),
    (
        {
            "objectStore": {
                "bundled": False,
                "existingSecret": "s",
                "external": {"endpoint": "h", "credentials": "chain"},
            }
        },
        "objectStore.existingSecret is of the bundled object store",
    ),
    (
        {
            "objectStore": {
                "bundled": False,
                "external": {"endpoint": "h", "credentials": "chain", "existingSecret": "s"},
            }
        },
        "objectStore.external.existingSecret does nothing",
    ),
    (
        {"engine": {"model": {"s3": {"credentials": "chain", "existingSecret": "s"}}}},
        "engine.model.s3.existingSecret does nothing",
    ),
    (
        {"engine": {"resources": {"limits": {"memory": "4Gi"}}}},
        "engine.resources.requests.memory (16Gi) is over engine.resources.limits.memory (4Gi)",
    ),
    (
        {"redis": {"resources": {"requests": {"cpu": "1500m"}}}},
        "redis.resources.requests.cpu (1500m) is over redis.resources.limits.cpu (1)",
    ),
    ({"engine": {"tiers": {"hostBytes": "64Gi"}}}, "engine.tiers.hostBytes (64Gi) does not fit"),
    (
        {"engine": {"tiers": {"names": "disk", "diskPersistent": True, "diskBytes": "80Gi"}}},
        "engine.tiers.diskBytes (80Gi) does not fit into engine.persistence.size (40Gi)",
    ),
    (
        {
            "engine": {
                "tiers": {"names": "disk", "diskBytes": "80Gi"},
                "resources": {"limits": {"ephemeral-storage": "50Gi"}},
            }
        },
        "engine.tiers.diskBytes (80Gi) does not fit into engine.resources.limits.ephemeral-storage (50Gi)",
    ),
    ({"engine": {"tiers": {"names": "store", "storeBytes": "1Ti"}}}, "engine.tiers.storeBytes (1Ti) does not fit"),
    (
        {"engine": {"autoscaling": {"enabled": True, "fallback": {"replicas": 9}}}},
        "engine.autoscaling.fallback.replicas is over",
    ),
)


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_what_cannot_work_names_the_value(values: Mapping[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(message)):
        render(values)


def test_every_refusal_is_tried() -> None:
    template = (CHART / "templates" / "_validate.tpl").read_text()
    messages = re.findall(r'(?:fail|fail \(printf) "([^"]+)"', template)
    assert len(messages) >= 30
    told = []
    for values, _ in REFUSED:
        with pytest.raises(helm_python.HelmError) as refused:
            render(values)
        told.append(str(refused.value))
    patterns = [re.sub("%[sd]", ".+", re.escape(one)) for one in messages]
    assert [one for one in patterns if not any(re.search(one, text) for text in told)] == []


def test_every_value_named_in_a_message_exists() -> None:
    template = (CHART / "templates" / "_validate.tpl").read_text()
    for message in re.findall(r'fail "([^"]+)"', template):
        for path in re.findall(
            r"\b(?!tls\.(?:crt|key)\b)(?:engine|gateway|redis|objectStore|tls|telemetry)(?:\.[A-Za-z0-9]+)+", message
        ):
            found: Any = DEFAULTS
            for key in path.split("."):
                assert key in found, path
                found = found[key]


def objects(schema: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every object whose keys are the schema's own."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    if schema.get("additionalProperties") is False:
        yield path
    for key, below in schema.get("properties", {}).items():
        yield from objects(below, (*path, key))


PATHS = list(objects(SCHEMA))


def at(path: tuple[str, ...], value: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return value


def test_all_of_values_yaml_is_in_the_schema() -> None:
    assert len(PATHS) > 40
    render(merged(DEFAULTS, OURS))


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_a_typo_is_refused_wherever_it_is(path: tuple[str, ...]) -> None:
    with pytest.raises(helm_python.HelmValuesError, match=r"additional propert.*'replicaz' not allowed"):
        render(at(path, {"replicaz": 1}))


@pytest.mark.parametrize(
    "values",
    [
        {"gateway": {"replicas": 0}},
        {"gateway": {"replicas": "2"}},
        {"engine": {"device": "gpu"}},
        {"engine": {"quantization": "int8"}},
        {"engine": {"model": {"source": "S3"}}},
        {"engine": {"model": {"digest": "abc"}}},
        {"engine": {"model": {"s3": {"uri": "https://x"}}}},
        {"engine": {"model": {"path": "../etc"}}},
        {"engine": {"gpu": {"resource": "gpu"}}},
        {"engine": {"env": {"MAX_NUM_SEQS": 4}}},
        {"engine": {"env": {"TEMPER_MAX_NUM_SEQS": [4]}}},
        {"engine": {"resources": {"limits": {"cpu": "1", "memory": "1GB"}}}},
        {"engine": {"resources": {"limits": {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "2"}}}},
        {"engine": {"drainSeconds": -1}},
        {"engine": {"tiers": {"names": "host, tape"}}},
        {"engine": {"tiers": {"hostBytes": "8GB"}}},
        {"engine": {"tiers": {"diskBytes": "0Gi"}}},
        {"gateway": {"image": {"tag": "latest"}}},
        {"gateway": {"image": {"digest": "sha256:123"}}},
        {"gateway": {"ingress": {"host": "https://x"}}},
        {"objectStore": {"external": {"endpoint": "http://minio:9000"}}},
        {"telemetry": {"otlpEndpoint": "collector:4317"}},
        {"telemetry": {"traceRatio": 2}},
        {"monitoring": {"interval": "15"}},
        {"tls": {"certManager": {"issuerRef": {"nam": "x"}}}},
        {"networkPolicy": {"webhookPorts": []}},
        {"networkPolicy": {"webhookPorts": [70000]}},
        {"tls": "yes"},
    ],
    ids=json.dumps,
)
def test_a_wrong_value_is_refused(values: Mapping[str, Any]) -> None:
    with pytest.raises(helm_python.HelmValuesError):
        render(merged(values_file("cpu-demo"), values))


def test_numbers_keep_their_digits() -> None:
    release = render({"engine": {"env": {"TEMPER_MAX_MODEL_LEN": 1048576, "TEMPER_MEMORY_FRACTION": 0.85}}})
    (container,) = release.workload("engine").containers
    env = container.env()
    assert env["TEMPER_MAX_MODEL_LEN"] == "1048576"
    assert env["TEMPER_MEMORY_FRACTION"] == "0.85"
