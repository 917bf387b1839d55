"""What holds for every object of every combination of values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import helm_python
import pytest

from services.common.settings import CommonSettings
from services.engine.settings import EngineSettings
from services.gateway.server.smoke_test import SmokeSettings
from services.gateway.settings import GatewaySettings
from services.model_source.settings import ModelSourceSettings
from services.trainer.settings import TrainerSettings
from tests.chart.conftest import COMBINATIONS
from tests.chart.render import CHART, NAMESPACE, OURS, Container, Rendered, Workload, render, values_file
from tests.chart.validation import VERSIONS, problems

CREDENTIAL = re.compile(r"password|passwd|secret|token|credential|api-?key|access-?key|private", re.IGNORECASE)
TAG = re.compile(r"(?P<name>[^@]+):(?P<tag>[A-Za-z0-9._-]+)|[^@]+@sha256:[0-9a-f]{64}")


def containers(release: Rendered) -> Iterator[tuple[Workload, Container]]:
    for workload in release.workloads:
        for container in (*workload.init_containers, *workload.containers):
            yield workload, container


def test_there_are_enough_combinations() -> None:
    assert len(COMBINATIONS) >= 40


def test_helm_lints_it() -> None:
    found = helm_python.lint(CHART)
    assert "[ERROR]" not in str(found), found


def test_kubernetes_takes_every_object(release: Rendered) -> None:
    assert len(release.objects) >= 7
    assert [p for obj in release.objects for version in VERSIONS for p in problems(obj, version)] == []


def test_validation_finds_typos() -> None:
    """Or the test above would prove nothing."""
    release = render(values_file("multi-gpu"))
    kinds = {obj["kind"] for obj in release.objects}
    assert {"StatefulSet", "ScaledObject", "ServiceMonitor"} <= kinds
    for obj in release.objects:
        if "spec" in obj:
            spoilt = {**obj, "spec": {**obj["spec"], "replica": 1}}
            assert list(problems(spoilt, "1.37")), obj["kind"]
            assert list(problems(spoilt, "1.30")), obj["kind"]


def test_names_are_unique_and_short(release: Rendered) -> None:
    names = [(obj["kind"], obj["metadata"]["name"]) for obj in release.objects]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for _, name in names)
    namespaces = {obj["metadata"].get("namespace", NAMESPACE) for obj in release.objects}
    assert namespaces == {NAMESPACE}


def test_pods_are_restricted(release: Rendered, values: Mapping[str, Any]) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted, and more."""
    for workload in release.workloads:
        pod = workload.pod
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        if values["global"]["openshift"]:
            assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(security), "the namespace's own"
        else:
            assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for volume in pod.get("volumes", ()):
            assert set(volume) - {"name"} <= {"emptyDir", "secret", "configMap", "persistentVolumeClaim"}
    for _, container in containers(release):
        security = container.spec["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["privileged"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert not any("hostPort" in port for port in container.spec.get("ports", ()))


def test_every_container_has_limits_and_long_running_ones_probes(release: Rendered) -> None:
    for workload, container in containers(release):
        for bound in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(container.spec["resources"][bound]), (workload.name, container.name)
        if container in workload.containers and workload.manifest["kind"] != "Pod":
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert probe in container.spec, (workload.name, probe)


def test_images_are_pinned(release: Rendered, values: Mapping[str, Any]) -> None:
    registry = values["global"]["imageRegistry"]
    for _, container in containers(release):
        match = TAG.fullmatch(container.spec["image"])
        assert match, container.spec["image"]
        assert match["tag"] != "latest"
        assert container.spec["image"].startswith(registry)
        if registry:
            assert "docker.io" not in container.spec["image"]


def test_no_secret_is_in_plain_text(release: Rendered) -> None:
    secrets = {text for keys in release.secrets.values() for text in keys.values() if len(text) >= 16}
    for obj in release.objects:
        if obj["kind"] != "Secret":
            written = str(obj)
            assert not [text for text in secrets if text in written], obj["metadata"]["name"]
    for _, container in containers(release):
        for entry in container.spec.get("env", ()):
            if CREDENTIAL.search(entry["name"].replace("_", "-")) and not entry["name"].endswith("_FILE"):
                assert "value" not in entry or not CREDENTIAL.search(entry["value"]), entry
            if entry["name"] == "TEMPER_REDIS_URL":
                assert "$(REDIS_PASSWORD)" in entry.get("value", "") or "secretKeyRef" in entry["valueFrom"]
    for obj in release.of("ConfigMap"):
        assert "requirepass" not in str(obj["data"])


def test_generated_secrets_are_long_and_kept(release: Rendered) -> None:
    for obj in release.of("Secret"):
        assert obj["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        assert all(len(text) >= 32 for text in obj["stringData"].values())


def test_services_reach_what_listens(release: Rendered) -> None:
    for service in release.of("Service"):
        selector = service["spec"]["selector"]
        selected = [workload for workload in release.workloads if selector.items() <= workload.labels.items()]
        assert len(selected) == 1, service["metadata"]["name"]
        ports = {name: number for container in selected[0].containers for name, number in container.ports.items()}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports, service["metadata"]["name"]


def test_selectors_select_exactly_their_own(release: Rendered) -> None:
    for workload in release.workloads:
        if workload.manifest["kind"] == "Pod":
            continue
        labels = workload.manifest["spec"]["selector"]["matchLabels"]
        selected = [other.name for other in release.workloads if labels.items() <= other.labels.items()]
        assert selected == [workload.name]
        assert "app.kubernetes.io/version" not in labels, "a selector cannot be changed by an upgrade"
    for obj in release.of("PodDisruptionBudget", "ServiceMonitor", "PodMonitor"):
        labels = obj["spec"]["selector"]["matchLabels"]
        found = [one for one in release.workloads if labels.items() <= one.labels.items()]
        assert [obj["metadata"]["name"]] == [one.name for one in found]


def test_what_is_referred_to_is_there(release: Rendered) -> None:
    names = {(obj["kind"], obj["metadata"]["name"]) for obj in release.objects}
    for obj in release.of("HorizontalPodAutoscaler", "ScaledObject"):
        target = obj["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in names
        assert "replicas" not in release.workload(obj["metadata"]["labels"]["app.kubernetes.io/component"]).manifest
        (workload,) = [one for one in release.workloads if one.name == target["name"]]
        assert "replicas" not in workload.manifest["spec"], "two would fight over it"
    services = {obj["metadata"]["name"]: obj for obj in release.of("Service")}
    for obj in release.of("Ingress"):
        backend = obj["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
        assert backend["port"]["name"] in [port["name"] for port in services[backend["name"]]["spec"]["ports"]]
    for obj in release.of("HTTPRoute"):
        (backend,) = obj["spec"]["rules"][0]["backendRefs"]
        if "kind" in backend:
            assert (backend["kind"], backend["name"]) in names
            continue
        assert backend["port"] in [port["port"] for port in services[backend["name"]]["spec"]["ports"]]
    for obj in release.of("InferenceObjective"):
        assert ("InferencePool", obj["spec"]["poolRef"]["name"]) in names
    accounts = {name for kind, name in names if kind == "ServiceAccount"}
    for workload in release.workloads:
        assert workload.pod["serviceAccountName"] in (accounts or {"temper"})
        assert ("StatefulSet", workload.name) not in names or workload.manifest["spec"]["serviceName"] in services
        priority = workload.pod.get("priorityClassName")
        assert priority is None or ("PriorityClass", priority) in names


def test_every_mount_has_its_volume(release: Rendered) -> None:
    for workload, container in containers(release):
        spec = workload.manifest["spec"]
        claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())}
        volumes = {volume["name"] for volume in workload.pod.get("volumes", ())}
        assert not claims & volumes
        for mount in container.spec.get("volumeMounts", ()):
            assert mount["name"] in claims | volumes, (workload.name, mount)


SETTINGS: Mapping[str, tuple[type[CommonSettings] | type[SmokeSettings], ...]] = {
    "gateway": (GatewaySettings,),
    "engine": (EngineSettings, TrainerSettings),
    "model": (ModelSourceSettings,),
    "smoke": (SmokeSettings,),
}
ELSEWHERE = "0123456789abcdef0123456789abcdef"
"""What a Secret of somebody else may hold."""


def given(container: Container, secrets: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    return {
        reference: "redis://:x@redis.example.com:6379/0" if name == "TEMPER_REDIS_URL" else ELSEWHERE
        for name, reference in container.references.items()
        if reference[0] not in secrets
    }


def test_services_understand_their_environment(
    release: Rendered, values: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for workload, container in containers(release):
        if container.name not in SETTINGS:
            continue
        env = container.env(given(container, release.secrets))
        ours = {name for name in env if name.startswith("TEMPER_")}
        # What fetches the checkpoint has the engine's settings as well, and the engine those of that.
        known = (*SETTINGS[container.name], *(SETTINGS["engine"] if container.name == "model" else ()))
        known += SETTINGS["model"] if container.name == "engine" else ()
        fields = {f"TEMPER_{field.upper()}" for one in known for field in one.model_fields}
        assert ours <= fields, "a setting that nothing reads"
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        read = [settings() for settings in SETTINGS[container.name]]
        for name in env:
            monkeypatch.delenv(name)
        grace = workload.pod["terminationGracePeriodSeconds"]
        if isinstance(read[0], GatewaySettings):
            assert grace >= read[0].termination_seconds
            assert read[0].max_in_flight == 1024
        elif isinstance(read[0], EngineSettings):
            assert isinstance(read[1], TrainerSettings)
            assert grace >= read[0].termination_seconds(read[1].trainer_drain_seconds)
            assert read[0].device == values["engine"]["device"]
            probes = {container.spec[f"{kind}Probe"]["grpc"]["port"] for kind in ("startup", "liveness", "readiness")}
            assert probes == {read[0].health_port}
            addresses = filter(None, (read[0].kv_events, read[0].kv_events_replay))
            events = {int(address.rpartition(":")[2]) for address in addresses}
            ports = {read[0].grpc_port, read[0].health_port, read[0].metrics_port}
            assert set(container.ports.values()) == ports | events


def test_engines_get_one_gpu_or_none(release: Rendered, values: Mapping[str, Any]) -> None:
    container, *beside = release.workload("engine").containers
    assert [one.name for one in beside] == (["gateway"] if values["engine"]["http"]["enabled"] else [])
    assert not [name for one in beside for name in one.spec["resources"]["limits"] if "/" in name]
    others = {name: count for name, count in container.spec["resources"]["limits"].items() if "/" in name}
    assert others == ({} if values["engine"]["device"] == "cpu" else {values["engine"]["gpu"]["resource"]: 1})


def test_only_volumes_are_written_to(release: Rendered) -> None:
    """The root is read-only: every path that a setting names to write lies in a mount that allows it."""
    container = release.workload("engine").containers[0]
    env = container.env(given(container, release.secrets))
    writable = [mount["mountPath"] for mount in container.spec["volumeMounts"] if not mount.get("readOnly")]
    for name in ("TEMPER_CACHE_DIR", "TEMPER_CHECKPOINT_DIR"):
        assert any(env[name].startswith(f"{path}/") for path in writable), name


GIB = 2**30
TIERS: tuple[tuple[Mapping[str, Any], tuple[int, int, int]], ...] = (
    ({}, (0, 32 * GIB, 256 * GIB)),
    ({"names": "host,disk,store", "hostBytes": "512Mi"}, (GIB // 2, 32 * GIB, 20 * GIB)),
    ({"names": "disk", "diskBytes": "30Gi", "diskPersistent": True}, (0, 30 * GIB, 256 * GIB)),
)


@pytest.mark.parametrize(("tiers", "sizes"), TIERS)
def test_tiers_have_their_sizes_and_the_disk_its_volume(
    tiers: Mapping[str, Any], sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = render({"engine": {"tiers": tiers}})
    workload = release.workload("engine")
    (container,) = workload.containers
    for name, value in container.env(given(container, release.secrets)).items():
        monkeypatch.setenv(name, value)
    settings = EngineSettings()
    assert settings.tiers == tiers.get("names", "host")
    assert (settings.tier_host_bytes, settings.tier_disk_bytes, settings.tier_store_bytes) == sizes
    mounts = {mount["mountPath"]: mount["name"] for mount in container.spec["volumeMounts"]}
    if "disk" not in settings.tiers:
        assert "/tier" not in mounts
        return
    kept = "diskPersistent" in tiers
    assert mounts[str(settings.tier_directory.parent)] == ("data" if kept else "tier")
    # What lies on the node is asked of the node, and ends an engine that takes more.
    assert ("ephemeral-storage" in container.spec["resources"]["requests"]) != kept
    limits = [volume["emptyDir"]["sizeLimit"] for volume in workload.pod["volumes"] if volume["name"] == "tier"]
    assert limits == ([] if kept else [int(sizes[1] * 1.1)])


def test_a_release_of_another_name() -> None:
    with helm_python.Chart.load(CHART) as chart:
        long = chart.render(OURS, name="a" * 53, namespace="x")
        same = chart.render(OURS, name="temper", namespace="x")
    for text in long.values():
        assert all(len(name) <= 63 for name in re.findall(r"^  name: (\S+)$", text, re.MULTILINE))
    assert "name: temper-gateway" in same["temper/templates/gateway.yaml"]


def test_notes_say_what_is_unsafe() -> None:
    assert "may do everything" in render({}).notes
    assert "may do everything" not in render(values_file("single-gpu")).notes
