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


def test_there_are_examples() -> None:
    assert [one.stem for one in EXAMPLES] == ["aibrix-model-adapter", "kserve-inference-service"]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_its_crd_takes_it_and_nothing_unknown(file: Path) -> None:
    (manifest,) = documents(file.read_text())
    assert list(problems(manifest, VERSIONS[-1])) == []
    assert list(problems({**manifest, "spec": {**manifest["spec"], "replica": 1}}, VERSIONS[-1]))


def test_aibrix_finds_the_engines_with_the_values_that_it_names() -> None:
    text = (CHART.parent / "examples" / "aibrix-model-adapter.yaml").read_text()
    (said,) = re.findall(r"^#\n((?:#   .*\n)+)", text, re.MULTILINE)
    values = yaml.safe_load(re.sub(r"^# {3}", "", said, flags=re.MULTILINE))
    engine = render(values).workload("engine")
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
