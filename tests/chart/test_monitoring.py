"""Alerts, dashboards and what Prometheus scrapes, as the chart installs them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.render import CHART, NAMESPACE, RELEASE, Rendered, render, values_file
from tests.promtool import Promtool

WATCHED = {"monitoring": {"enabled": True, "runbooksUrl": "https://wiki.example.com/temper/"}}


@pytest.fixture(scope="module")
def watched() -> Rendered:
    return render(WATCHED)


def test_there_are_rules_and_dashboards() -> None:
    assert len(list(CHART.glob("rules/*.yaml"))) >= 4
    assert {path.stem for path in CHART.glob("dashboards/*.json")} == {"serving", "training", "adapters", "cluster"}


def test_every_rule_is_installed_for_this_release(watched: Rendered) -> None:
    files = [yaml.safe_load(path.read_text()) for path in CHART.glob("rules/*.yaml")]
    wanted = {
        rule.get("alert") or rule["record"] for file in files for group in file["groups"] for rule in group["rules"]
    }
    found = [rule for one in watched.of("PrometheusRule") for group in one["spec"]["groups"] for rule in group["rules"]]
    assert {rule.get("alert") or rule["record"] for rule in found} == wanted
    for rule in found:
        assert '=~".*"' not in rule["expr"]
        assert f'namespace="{NAMESPACE}"' in rule["expr"] or "temper" in rule["expr"]
        if "alert" in rule:
            assert rule["annotations"]["runbook_url"] == f"https://wiki.example.com/temper/{rule['alert']}.md"
            assert (CHART.parents[1] / "docs" / "runbooks" / f"{rule['alert']}.md").exists()


def test_thresholds_are_those_of_the_values(promtool: Promtool, tmp_path: Path) -> None:
    wanted = {
        "errorShare": 0.0007,
        "firstTokenSeconds": 30,
        "betweenTokensSeconds": 1.5,
        "waitingRequests": 64,
        "kvCacheShare": 0.5,
        "volumeFreeShare": 0.2,
    }
    own = render({"monitoring": {**WATCHED["monitoring"], "thresholds": wanted}})
    text = ""
    for rules in own.of("PrometheusRule"):
        file = tmp_path / f"{rules['metadata']['name']}.yaml"
        file.write_text(yaml.safe_dump(rules["spec"]))
        assert promtool("check", "rules", file).returncode == 0
        text += "\n".join(rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]) + "\n"
    (claims,) = set(re.findall(r'persistentvolumeclaim=~"([^"]+)"', text))
    own_claims = [claim["metadata"]["name"] for claim in own.of("PersistentVolumeClaim")]
    own_claims += [
        f"{template['metadata']['name']}-{one['metadata']['name']}-0"
        for one in own.of("StatefulSet")
        for template in one["spec"].get("volumeClaimTemplates", ())
    ]
    assert own_claims
    assert all(re.fullmatch(claims, name) for name in own_claims), "its own volumes"
    assert not re.fullmatch(claims, "data-postgres-0"), "and no others of the namespace"
    for name, value in wanted.items():
        found = re.findall(rf"([0-9.]+) # {name}$", text, re.M)
        assert found, name
        assert {float(one) for one in found} == {value}, name


def test_promtool_takes_them_as_installed(watched: Rendered, promtool: Promtool, tmp_path: Path) -> None:
    for rules in watched.of("PrometheusRule"):
        file = tmp_path / f"{rules['metadata']['name']}.yaml"
        file.write_text(yaml.safe_dump(rules["spec"]))
        done = promtool("check", "rules", file)
        assert done.returncode == 0, done.stderr


def test_dashboards_are_whole(watched: Rendered) -> None:
    maps = [one for one in watched.of("ConfigMap") if one["metadata"]["labels"].get("grafana_dashboard")]
    assert len(maps) == 4
    for one in maps:
        ((name, text),) = one["data"].items()
        assert json.loads(text)["title"]
        assert "RUNBOOKS_URL" not in text
        assert len(text.encode()) < 1_000_000, "a ConfigMap has 1 MiB"
        original = json.loads((CHART / "dashboards" / name).read_text())
        assert json.loads(text).keys() == original.keys()


def test_without_an_address_of_runbooks_nothing_leads_nowhere(promtool: Promtool, tmp_path: Path) -> None:
    release = render({"monitoring": {"enabled": True}})
    boards = [one for one in release.of("ConfigMap") if one["metadata"]["labels"].get("grafana_dashboard")]
    assert len(boards) == 4
    for board in boards:
        ((name, text),) = board["data"].items()
        whole = json.loads((CHART / "dashboards" / name).read_text())
        assert _without_runbooks(whole) == json.loads(text)
    for rules in release.of("PrometheusRule"):
        alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
        assert all(set(alert["annotations"]) == {"summary", "description"} for alert in alerts)
        file = tmp_path / f"{rules['metadata']['name']}.yaml"
        file.write_text(yaml.safe_dump(rules["spec"]))
        assert promtool("check", "rules", file).returncode == 0


def _without_runbooks(tree: Any) -> Any:
    """A dashboard without links to runbooks."""
    if isinstance(tree, dict):
        return {key: _without_runbooks(below) for key, below in tree.items()}
    if isinstance(tree, list):
        return [
            _without_runbooks(one) for one in tree if not (isinstance(one, dict) and "RUNBOOKS" in str(one.get("url")))
        ]
    return tree


def test_scraped_series_have_the_labels_that_rules_ask_for(watched: Rendered) -> None:
    for kind, component in (("ServiceMonitor", "gateway"), ("PodMonitor", "engine")):
        (monitor,) = watched.of(kind)
        spec = monitor["spec"]
        (endpoint,) = spec.get("endpoints") or spec["podMetricsEndpoints"]
        assert "metricRelabelings" not in endpoint
        labels = {entry["targetLabel"]: entry["replacement"] for entry in endpoint["relabelings"]}
        assert labels == {"release": RELEASE, "component": component}


def test_a_gateway_beside_an_engine_is_scraped_as_a_gateway() -> None:
    """Its series of the engine are left out, or sums would count them twice."""
    release = render(WATCHED, {"engine": {"http": {"enabled": True}}})
    (monitor,) = release.of("PodMonitor")
    engine, gateway = monitor["spec"]["podMetricsEndpoints"]
    ports = {name: one.name for one in release.workload("engine").containers for name in one.ports}
    assert [ports[endpoint["port"]] for endpoint in (engine, gateway)] == ["engine", "gateway"]
    assert [entry["replacement"] for entry in gateway["relabelings"]] == [RELEASE, "gateway"]
    assert gateway["metricRelabelings"] == [{"sourceLabels": ["__name__"], "regex": "vllm:.*", "action": "drop"}]


def test_what_scales_engines_is_exported() -> None:
    """By the page of metrics, which a test compares with the code."""
    exported = set(re.findall(r"^\| `([^`]+)`", (CHART.parents[1] / "docs/guides/metrics.md").read_text(), re.M))
    (scaled,) = render(values_file("multi-gpu")).of("ScaledObject")
    for trigger in scaled["spec"]["triggers"]:
        (name,) = re.findall(r"\(([a-z_:]+)\{", trigger["metadata"]["query"])
        assert name in exported
