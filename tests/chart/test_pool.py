"""Engines as members of an InferencePool: the gateway beside each, its end, and what endpoint pickers look for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.chart.combinations import AXES
from tests.chart.render import POD_IP, render
from tests.chart.test_values import raw_env

MEMBERS: Mapping[str, Any] = {"engine": {"http": {"enabled": True}}}
PICKED = {
    "llm-d.ai/inference-serving": "true",
    "llm-d.ai/engine-type": "vllm",
    "inference.networking.k8s.io/engine-type": "vllm",
}
"""Labels: llm-d-router, pkg/kvevents/pool.go and the metrics extractor's mapping_registry.go."""


def test_it_is_the_gateway_of_the_release_for_one_engine(release: Any, values: Mapping[str, Any]) -> None:
    """In everything that a user says of gateways."""
    (own,) = release.workload("gateway").containers
    engine, *beside = release.workload("engine").containers
    if not values["engine"]["http"]["enabled"]:
        assert beside == []
        return
    (one,) = beside
    assert (one.spec["image"], one.command, one.args) == (own.spec["image"], own.command, own.args)
    there, here = raw_env(own), raw_env(one)
    assert here["TEMPER_ENGINES"]["value"] == f"127.0.0.1:{engine.ports['grpc']}"
    assert here["TEMPER_PORT"]["value"] == str(one.ports["http"]) == "8000"
    assert (here["TEMPER_BATCH_WORKERS"]["value"], here["TEMPER_LEARNERS"]["value"]) == ("0", "false")
    assert here["TEMPER_WEBHOOKS"]["value"] == "false", "the network policy of engines would not let it out"
    assert here["TEMPER_UI"]["value"] == "false"
    different = [f"TEMPER_{one}" for one in ("ENGINES", "PORT", "BATCH_WORKERS", "LEARNERS", "WEBHOOKS", "UI")]
    assert {name: entry for name, entry in here.items() if name not in different} == {
        name: entry for name, entry in there.items() if name not in different
    }
    assert one.spec.get("envFrom") == own.spec.get("envFrom")
    unnamed = [
        {path: ({**volume, "name": ""}, sub) for path, (volume, sub) in each.mounts.items()} for each in (one, own)
    ]
    assert unnamed[0] == unnamed[1], "the same Secrets and volumes at the same paths"
    mounted = {mount["name"] for mount in one.spec["volumeMounts"]} & {
        mount["name"] for mount in engine.spec["volumeMounts"]
    }
    assert mounted <= {"ca-bundle"}, "nothing else of the engine's"


def test_pods_have_the_labels_that_pickers_select() -> None:
    assert not PICKED.keys() & render().workload("engine").labels.keys()
    own = {"engine": {**MEMBERS["engine"], "servedModelName": "Qwen/Qwen3.5 4B", "podLabels": {"app": "mine"}}}
    labels = render(own).workload("engine").labels
    assert PICKED.items() <= labels.items()
    assert labels["llm-d.ai/model"] == "Qwen-Qwen3.5-4B"
    assert labels["app"] == "mine", "the values' own"


@pytest.mark.parametrize(
    ("values", "delay", "grace"),
    [
        ({}, 6, 621),
        ({"gateway": {"drainDelaySeconds": 0, "shutdownGraceSeconds": 30}, "engine": {"drainSeconds": 30}}, 1, 46),
        ({"engine": {"drainSeconds": 10}}, 6, 620),
    ],
    ids=["defaults", "short", "the gateway's is longer"],
)
def test_the_engine_ends_after_the_gateway_beside_it(values: Mapping[str, Any], delay: int, grace: int) -> None:
    """It hears of its end a second after that one accepts nothing more, and the pod's grace has room for both."""
    workload = render(MEMBERS, values).workload("engine")
    engine, gateway = workload.containers
    assert engine.spec["lifecycle"] == {"preStop": {"sleep": {"seconds": delay}}}
    assert float(raw_env(gateway)["TEMPER_DRAIN_DELAY_SECONDS"]["value"]) < delay
    assert workload.pod["terminationGracePeriodSeconds"] == grace
    (alone,) = render(values).workload("engine").containers
    assert "lifecycle" not in alone.spec


def test_the_pool_selects_engines_by_the_port_of_their_gateways() -> None:
    release = render(AXES["pool"]["published"])
    (pool,) = release.of("InferencePool")
    engine = release.workload("engine")
    selector = pool["spec"]["selector"]["matchLabels"]
    assert [one.name for one in release.workloads if selector.items() <= one.labels.items()] == [engine.name]
    _, gateway = engine.containers
    assert pool["spec"]["targetPorts"] == [{"number": gateway.ports["http"]}]
    assert pool["spec"]["endpointPickerRef"] == {
        "name": "temper-epp",
        "port": {"number": 9002},
        "failureMode": "FailOpen",
    }
    objectives = {one["metadata"]["name"]: one["spec"] for one in release.of("InferenceObjective")}
    assert {name: spec["priority"] for name, spec in objectives.items()} == {"chat": 10, "batch": -10}
    (route,) = release.of("HTTPRoute")
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool["metadata"]["name"]}
    ]
    assert [match["path"]["value"] for match in rule["matches"]] == ["/v1/chat/completions", "/v1/completions"]


def test_kv_events_name_the_address_that_requests_go_to() -> None:
    """llm-d-router, pkg/kvevents/engineadapter/common.go: "kv@<pod-id>@<model-name>", where the id is an endpoint's."""
    name = "TEMPER_KV_EVENTS_TOPIC"
    release = render(AXES["pool"]["published"])
    engine, gateway = release.workload("engine").containers
    own = dict.fromkeys(set(engine.references.values()), "x")
    assert engine.env(own)[name] == f"kv@{POD_IP}:{gateway.ports['http']}@qwen3.5"
    (alone,) = render({"engine": {"kvEvents": {"enabled": True}}}).workload("engine").containers
    assert name not in raw_env(alone), "by the engine's own name"
