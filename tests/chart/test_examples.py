"""Manifests of charts/examples: the schemas of the projects that read them, and what the chart renders beside them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.gateway.settings import GatewaySettings
from tests.chart.network import matches
from tests.chart.render import CHART, NAMESPACE, RELEASE, Container, documents, render
from tests.chart.test_objects import given
from tests.chart.validation import VERSIONS, problems

EXAMPLES = sorted((CHART.parent / "examples").glob("*.yaml"))


def example(name: str) -> Any:
    (found,) = documents((CHART.parent / "examples" / f"{name}.yaml").read_text())
    return found


def values_of(name: str) -> Any:
    """Values of the release that the comment of an example names."""
    text = (CHART.parent / "examples" / f"{name}.yaml").read_text()
    (said,) = re.findall(r"^#\n((?:#   .*\n)+)", text, re.MULTILINE)
    return yaml.safe_load(re.sub(r"^# {3}", "", said, flags=re.MULTILINE))


def test_there_are_examples() -> None:
    assert [one.stem for one in EXAMPLES] == [
        "aibrix-model-adapter",
        "kserve-inference-service",
        "kserve-llm-inference-service",
    ]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_its_crd_takes_it_and_nothing_unknown(file: Path) -> None:
    (manifest,) = documents(file.read_text())
    assert list(problems(manifest, VERSIONS[-1])) == []
    assert list(problems({**manifest, "spec": {**manifest["spec"], "replica": 1}}, VERSIONS[-1]))


def test_aibrix_finds_the_engines_with_the_values_that_it_names() -> None:
    engine = render(values_of("aibrix-model-adapter")).workload("engine")
    spec = example("aibrix-model-adapter")["spec"]
    assert matches(spec["podSelector"], engine.labels)
    _, gateway = engine.containers
    assert gateway.ports["http"] == 8000, "AIBrix calls this port"
    env = gateway.env(given(gateway, gateway.secrets))
    assert spec["artifactURL"].startswith(f"{env['TEMPER_ADAPTERS_S3']}/")


def test_gateways_of_kserve_are_as_those_of_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = example("kserve-inference-service")
    predictor = manifest["spec"]["predictor"]
    release = render()
    workload = release.workload("gateway")
    assert predictor["labels"] == workload.labels
    assert (manifest["metadata"]["namespace"], predictor["labels"]["app.kubernetes.io/instance"]) == (
        NAMESPACE,
        RELEASE,
    )
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    pod |= {"spec": {"containers": predictor["containers"]}}
    assert [problem for version in VERSIONS for problem in problems(pod, version)] == []
    (spec,), (own,) = predictor["containers"], workload.containers
    assert (spec["image"], spec["resources"]) == (own.spec["image"], own.spec["resources"])
    env, there = Container(predictor, spec, release.secrets).env(), own.env()
    settings = {name for name in env if name.startswith("TEMPER_")} - {"TEMPER_PORT"}
    assert {name: env[name] for name in settings} == {name: there[name] for name in settings}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert GatewaySettings().port == spec["ports"][0]["containerPort"]


def test_engines_of_kserve_are_as_those_of_the_release() -> None:
    spec = example("kserve-llm-inference-service")["spec"]
    template = spec["template"]
    release = render({"engine": {"http": {"enabled": True}}})
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template}
    assert [problem for version in VERSIONS for problem in problems(pod, version)] == []
    main, engine = template["containers"]
    assert (main["name"], main["ports"][0]["containerPort"]) == ("main", 8000), (
        "what KServe's pool and its defaults name"
    )
    own_engine, own_gateway = release.workload("engine").containers
    for mine, own in ((main, own_gateway), (engine, own_engine)):
        assert (mine["image"], mine["resources"]) == (own.spec["image"], own.spec["resources"])
        assert mine["env"] == own.spec["env"], "reads the release's stores, serves its model"
    # KServe merges its container into this one by name: what it says of vLLM has to be said anew.
    assert main["command"] == ["python", "-m", "services.gateway"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert main[probe]["httpGet"]["scheme"] == "HTTP"
    assert spec["model"]["name"] == own_gateway.env()["TEMPER_SERVED_MODEL_NAME"]
    labels = {"app.kubernetes.io/part-of": "llminferenceservice", "kserve.io/component": "workload"}
    values = values_of("kserve-llm-inference-service")["networkPolicy"]
    assert [matches(peer["podSelector"], labels) for peers in values.values() for peer in peers] == [True, True]
    assert values.keys() == {"redisFrom", "objectStoreFrom"}
    render({"networkPolicy": values})
