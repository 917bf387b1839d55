"""Whether an alert fires on what a process exports: its own /metrics, with the labels that a target has, through the
rules as the chart installs them, in Prometheus' own evaluator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from observability.alerts.cases import rising, series
from tests.chart.render import NAMESPACE, Rendered
from tests.promtool import Promtool

MINUTES = 90


def fires(promtool: Promtool, directory: Path, release: Rendered, alert: str, scraped: str, pod: str) -> bool:
    """Whether an alert on a gateway fires that counts every minute what it has counted in all until now.

    Args:
        scraped: what its /metrics says.
    """
    (rules,) = (one["spec"] for one in release.of("PrometheusRule") if f"alert: {alert}" in yaml.safe_dump(one["spec"]))
    (monitor,) = release.of("ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    target = {one["targetLabel"]: one["replacement"] for one in endpoint["relabelings"]}
    # The operator adds these two of every target.
    target |= {"namespace": NAMESPACE, "pod": pod}
    (directory / "rules.yaml").write_text(yaml.safe_dump(rules))
    answers = [
        _holds(promtool, directory, _counters(scraped, target), alert, firing=firing) for firing in (True, False)
    ]
    assert sorted(answers) == [False, True], "promtool says neither or both"
    return answers[0]


def _counters(scraped: str, target: Mapping[str, str]) -> dict[str, str]:
    return {
        series(sample.name, {**sample.labels, **target}): rising(sample.value, minutes=MINUTES)
        for family in text_string_to_metric_families(scraped)
        if family.type == "counter"
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def _holds(promtool: Promtool, directory: Path, found: Mapping[str, str], alert: str, *, firing: bool) -> bool:
    expected = [{"labels": "{}", "value": 1}] if firing else []
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in found.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})',
                "eval_time": f"{MINUTES - 10}m",
                "exp_samples": expected,
            }
        ],
    }
    file = directory / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}))
    return promtool("test", "rules", file).returncode == 0
