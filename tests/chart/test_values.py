"""What single values promise."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python
import pytest

from tests.chart.render import CHART, NAMESPACE, OURS, RELEASE, Container, Rendered, files, merged, render, values_file

SOURCES: Mapping[str, Mapping[str, Any]] = {
    "a first look": values_file("cpu-demo"),
    "the image": {},
    "a claim": {"engine": {"model": {"source": "claim", "existingClaim": "c"}}},
    "the hub": values_file("single-gpu"),
    "the hub, one volume": merged(values_file("single-gpu"), {"engine": {"model": {"sharedClaim": "shared"}}}),
    "the bucket": values_file("multi-gpu"),
    "a disk tier": {"engine": {"tiers": {"names": "host,disk"}}},
    "a disk tier that stays": {"engine": {"tiers": {"names": "host,disk", "diskPersistent": True}}},
}


def container(release: Rendered, component: str) -> Container:
    (found,) = release.workload(component).containers
    return found


def raw_env(one: Container) -> dict[str, Any]:
    return {entry["name"]: entry for entry in one.spec["env"]}


# Secrets


@pytest.mark.parametrize("name", ["cpu-demo", "single-gpu"])
def test_two_renders_without_a_cluster_are_equal(name: str) -> None:
    values = (OURS, values_file(name), values_file("gitops"))
    assert files(*values) == files(*values)
    assert files(*values, upgrade=True) == files(*values)
    assert render(*values).of("Secret") == []


def test_passwords_are_drawn_where_that_is_allowed() -> None:
    assert files(OURS)["temper/templates/redis.yaml"] != files(OURS)["temper/templates/redis.yaml"]


def test_existing_secrets_are_the_ones_used() -> None:
    release = render({"redis": {"existingSecret": "mine"}, "objectStore": {"existingSecret": "keys"}})
    assert release.of("Secret") == []
    for component in ("gateway", "engine"):
        one = container(release, component)
        assert one.references["REDIS_PASSWORD"] == ("mine", "password")
        assert one.references["TEMPER_S3_ACCESS_KEY"] == ("keys", "access-key")
        assert one.references["TEMPER_S3_SECRET_KEY"] == ("keys", "secret-key")
        names = [entry["name"] for entry in one.spec["env"]]
        assert names.index("REDIS_PASSWORD") < names.index("TEMPER_REDIS_URL"), "Kubernetes expands what came before"
    assert container(release, "redis").references["REDISCLI_AUTH"] == ("mine", "password")
    assert container(release, "s3").references["AWS_SECRET_ACCESS_KEY"] == ("keys", "secret-key")


def test_pods_by_identity_are_told_no_keys() -> None:
    external = {"bundled": False, "external": {"endpoint": "s3.example.com", "credentials": "chain"}}
    model = {"source": "s3", "digest": "unchecked", "s3": {"uri": "s3://m"}}
    release = render({"objectStore": external, "engine": {"model": model}})
    for workload in ("gateway", "engine"):
        found = release.workload(workload)
        for one in (*found.containers, *found.init_containers):
            assert raw_env(one)["TEMPER_S3_CREDENTIALS"]["value"] == "chain"
            assert not {"TEMPER_S3_ACCESS_KEY", "TEMPER_S3_SECRET_KEY"} & set(raw_env(one))


# Pods, and what changes them


def _templates(release: Rendered) -> dict[str, Any]:
    return {one.name: one.template for one in release.workloads}


def test_another_version_of_the_chart_changes_no_pod(tmp_path: Path) -> None:
    copy = tmp_path / "temper"
    shutil.copytree(CHART, copy)
    text = (copy / "Chart.yaml").read_text()
    changed = re.sub(r"^version: .*$", "version: 9.9.9", text, flags=re.M)
    assert changed != text
    (copy / "Chart.yaml").write_text(changed)
    given = merged(OURS, values_file("gitops"))
    from tests.chart.render import parsed

    with helm_python.Chart.load(copy) as chart:
        later = parsed(chart.render(given, name=RELEASE, namespace=NAMESPACE))
    now = parsed(files(given))
    assert _templates(later) == _templates(now)
    assert "temper-9.9.9" in str(later.objects)


def test_a_changed_configuration_restarts_the_server() -> None:
    small = render({"redis": {"resources": {"limits": {"memory": "1Gi"}}}}).workload("redis")
    large = render().workload("redis")
    key = "checksum/config"
    assert small.template["metadata"]["annotations"][key] != large.template["metadata"]["annotations"][key]
    (one,) = large.containers
    assert all(sub_path == "" for _, sub_path in one.mounts.values()), "a subPath of a ConfigMap is never renewed"


@pytest.mark.parametrize(("limit", "data"), [("2Gi", 1503238553), ("512Mi", 375809638), ("1000M", 700000000)])
def test_the_server_is_full_before_its_pod_is(limit: str, data: int) -> None:
    release = render({"redis": {"resources": {"requests": {"memory": "64Mi"}, "limits": {"memory": limit}}}})
    (config,) = [one["data"]["valkey.conf"] for one in release.of("ConfigMap")]
    assert f"maxmemory {data}\n" in config
    assert "maxmemory-policy noeviction" in config
    assert 'save ""' in config


def test_volumes_survive_the_way_to_a_real_model() -> None:
    claims = {
        name: render(values).workload("engine").manifest["spec"]["volumeClaimTemplates"]
        for name, values in SOURCES.items()
    }
    assert all(one == claims["a first look"] for one in claims.values())


def test_the_model_is_where_the_engine_looks() -> None:
    for name, values in SOURCES.items():
        workload = render(values).workload("engine")
        (engine,) = workload.containers
        path = raw_env(engine)["TEMPER_MODEL"]["value"]
        for fetching in workload.init_containers:
            assert raw_env(fetching)["TEMPER_MODEL"]["value"] == path, name
            assert fetching.mounts["/models"] == engine.mounts["/models"], name
        if path.startswith("/models"):
            (mount,) = [one for one in engine.spec["volumeMounts"] if one["mountPath"] == "/models"]
            assert mount["readOnly"] is True


@pytest.mark.parametrize(
    ("values", "gateway", "engine"),
    [
        ({}, 620, 615),
        ({"gateway": {"requestTimeoutSeconds": 1200.5}}, 1221, 1216),
        ({"gateway": {"shutdownGraceSeconds": 30}, "engine": {"drainSeconds": 0}}, 50, 45),
    ],
)
def test_a_pod_ends_no_request_that_may_go_on(values: Mapping[str, Any], gateway: int, engine: int) -> None:
    release = render(values)
    assert release.workload("gateway").pod["terminationGracePeriodSeconds"] == gateway
    assert release.workload("engine").pod["terminationGracePeriodSeconds"] == engine


# What comes in and goes out


def test_only_the_api_is_published() -> None:
    keys = {"gateway": {"apiKeys": {"allowNone": True}}}
    (ingress,) = render(keys, {"gateway": {"ingress": {"enabled": True}}}).of("Ingress")
    assert [path["path"] for path in ingress["spec"]["rules"][0]["http"]["paths"]] == ["/v1"]
    (route,) = render(values_file("multi-gpu")).of("HTTPRoute")
    assert [one["path"] for one in route["spec"]["rules"][0]["matches"]] == [{"type": "PathPrefix", "value": "/v1"}]


def test_production_needs_no_controller_that_has_ended() -> None:
    release = render(values_file("multi-gpu"))
    assert release.of("Ingress") == []
    assert "nginx" not in str(release.objects)


def test_the_way_out_is_told_to_all_and_to_what_fetches_the_model() -> None:
    release = render(
        values_file("single-gpu"),
        {
            "env": {"TEMPER_LOG_LEVEL": "debug"},
            "engine": {"env": {"TEMPER_MODEL_ATTEMPTS": 9}, "extraEnv": [{"name": "TZ", "value": "UTC"}]},
            "proxy": {"https": "http://proxy:3128", "noProxy": [".example.internal"]},
            "caBundle": {"configMap": "authorities"},
        },
    )
    engine = release.workload("engine")
    for one in (*engine.containers, *engine.init_containers, container(release, "gateway")):
        env = raw_env(one)
        assert env["HTTPS_PROXY"]["value"] == "http://proxy:3128"
        assert "HTTP_PROXY" not in env
        assert env["NO_PROXY"]["value"] == "localhost,127.0.0.1,.svc,.cluster.local,.example.internal"
        volume, _ = one.mounts[str(Path(env["TEMPER_CA_BUNDLE"]["value"]).parent)]
        assert volume["configMap"]["name"] == "authorities"
        assert env["TEMPER_LOG_LEVEL"]["value"] == "debug"
    for one in (*engine.containers, *engine.init_containers):
        assert raw_env(one)["TEMPER_MODEL_ATTEMPTS"]["value"] == "9"
        assert raw_env(one)["TZ"]["value"] == "UTC"


def test_openshift_gives_users_and_resolvers() -> None:
    release = render({"global": {"openshift": True}})
    for workload in release.workloads:
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(workload.pod["securityContext"])
    ports = {
        port["port"]
        for policy in release.of("NetworkPolicy")
        for rule in policy["spec"].get("egress", ())
        for port in rule["ports"]
        if port["protocol"] == "UDP"
    }
    assert ports == {53, 5353}


def test_security_contexts_by_value() -> None:
    values = {"podSecurityContext": {"runAsUser": 5, "fsGroup": 6}, "securityContext": {"runAsGroup": 7}}
    parts = ("gateway", "engine", "redis", "objectStore", "test")
    release = render(dict.fromkeys(parts, values))
    for workload in release.workloads:
        security = workload.pod["securityContext"]
        assert (security["runAsUser"], security["fsGroup"], security["runAsNonRoot"]) == (5, 6, True)
        assert workload.containers[0].spec["securityContext"]["runAsGroup"] == 7


def test_objects_of_ones_own_are_templates() -> None:
    own = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-mine"}}
    release = render({"extraObjects": [own, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: text}\n"]})
    names = {one["metadata"]["name"] for one in release.of("ConfigMap")}
    assert {"demo-mine", "text"} <= names


# Scaling


def scaled(values: Mapping[str, Any]) -> Mapping[str, Any]:
    (found,) = render({"engine": {"autoscaling": {"enabled": True, **values}}}).of("ScaledObject")
    spec: Mapping[str, Any] = found["spec"]
    return spec


def test_full_engines_stay() -> None:
    spec = scaled({"minReplicas": 2, "requests": 100, "fallback": {"replicas": 3}})
    triggers = {one["name"]: one["metadata"] for one in spec["triggers"]}
    assert "num_requests_running" in triggers["requests"]["query"]
    assert "num_requests_waiting" in triggers["requests"]["query"]
    assert triggers["requests"]["threshold"] == "100"
    assert "queued|running" in triggers["jobs"]["query"]
    assert {one["ignoreNullValues"] for one in triggers.values()} == {"false"}
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert behavior["stabilizationWindowSeconds"] == spec["cooldownPeriod"] == 600
    assert behavior["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 120}]
    assert spec["fallback"] == {"failureThreshold": 4, "replicas": 3, "behavior": "currentReplicasIfHigher"}


def test_a_prometheus_that_asks_who_is_there() -> None:
    spec = scaled({"prometheusMetadata": {"authModes": "bearer"}, "authenticationRef": {"name": "p"}})
    for trigger in spec["triggers"]:
        assert trigger["authenticationRef"] == {"name": "p"}
        assert trigger["metadata"]["authModes"] == "bearer"


def test_work_wakes_the_first_engine_and_gateways_stay() -> None:
    values = {"engine": {"autoscaling": {"enabled": True, "minReplicas": 0}}}
    release = render(values)
    (found,) = release.of("ScaledObject")
    assert found["spec"]["minReplicaCount"] == 0
    triggers = {one["name"]: one["metadata"]["query"] for one in found["spec"]["triggers"]}
    # Without an engine there are no series of engines: what is asked then is what gateways know.
    assert all("temper_gateway_" in query for query in triggers.values())
    assert 'status="503"' in triggers["refused"]
    gateway = release.workload("gateway")
    assert gateway.replicas == 2
    (one,) = gateway.containers
    assert one.spec["readinessProbe"]["httpGet"]["path"] == "/livez", "or nobody reaches a gateway to wake one"
    assert container(render(), "gateway").spec["readinessProbe"]["httpGet"]["path"] == "/readyz"


CLAIM: Mapping[str, Any] = {"source": "claim", "existingClaim": "c"}


@pytest.mark.parametrize(
    "engine",
    [
        {"model": CLAIM},
        {"model": {**CLAIM, "claimAccessMode": "ReadWriteOnce"}},
        {"replicas": 2, "model": {**CLAIM, "claimAccessMode": "ReadOnlyMany"}},
        {"replicas": 2, "model": {**CLAIM, "claimAccessMode": "ReadWriteMany"}},
        {"replicas": 8, "model": CLAIM, "nodeSelector": {"kubernetes.io/hostname": "one"}},
        {"replicas": 2, "model": {"sharedClaim": "of no source that uses it"}},
        {"replicas": 2, "autoscaling": {"enabled": True, "maxReplicas": 1}, "model": CLAIM},
    ],
    ids=str,
)
def test_engines_share_a_claim_that_lets_them(engine: Mapping[str, Any]) -> None:
    """test_refusals.py has those that it does not let."""
    (model,) = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in render({"engine": engine}).workload("engine").pod["volumes"]
        if "persistentVolumeClaim" in volume
    ] or [None]
    assert model == ("c" if "source" in engine["model"] else None)
