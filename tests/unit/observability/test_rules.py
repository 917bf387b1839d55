"""Alerts: promtool accepts them, each fires when it should and only then, and each has a runbook."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from observability.alerts import GROUPS
from observability.catalogue import exported
from observability.foreign import TARGET
from observability.objectives import BETWEEN_TOKENS, FIRST_TOKEN, THRESHOLDS
from observability.promql import asked
from observability.rules import Alert, Case, Group
from observability.series import ANY_NAMESPACE, ANY_RELEASE, ANY_VOLUME
from tests.promtool import Promtool

ROOT = Path(__file__).resolve().parents[3]
RUNBOOKS = ROOT / "docs" / "runbooks"
ALERTS = [alert for group in GROUPS for alert in group.alerts]
groups = pytest.mark.parametrize("group", GROUPS, ids=lambda group: str(group.name))
alerts = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert.name))


@groups
def test_promtool_accepts_the_rules_and_their_tests(group: Group, promtool: Promtool, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(group.render())
    checked = promtool("check", "rules", tmp_path / "rules.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    (tmp_path / "tests.yaml").write_text(group.tests("rules.yaml"))
    tested = promtool("test", "rules", tmp_path / "tests.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


@groups
def test_the_tests_can_fail(group: Group, promtool: Promtool, tmp_path: Path) -> None:
    """The cases of an alert fail if its expression is negated."""
    text = group.render()
    changed = re.sub(r"(?<=for: )\d+m", "9999m", text)
    (tmp_path / "rules.yaml").write_text(changed)
    (tmp_path / "tests.yaml").write_text(group.tests("rules.yaml"))
    assert promtool("test", "rules", tmp_path / "tests.yaml").returncode != 0


@groups
def test_a_releases_own_rules_are_accepted(group: Group, promtool: Promtool, tmp_path: Path) -> None:
    """Rules as the chart renders them: its own namespace and release replace the placeholders."""
    text = group.render().replace(ANY_NAMESPACE, 'namespace="ml"').replace(ANY_RELEASE, 'release="temper"')
    text = text.replace(ANY_VOLUME, 'persistentvolumeclaim=~"data-temper-.+"')
    assert '=~".*"' not in text
    (tmp_path / "rules.yaml").write_text(text)
    assert promtool("check", "rules", tmp_path / "rules.yaml").returncode == 0


@pytest.mark.parametrize(
    ("name", "expr"), [(rule.name, rule.expr) for group in GROUPS for rule in (*group.recordings, *group.alerts)]
)
def test_what_is_asked_for_exists(
    name: str, expr: str, ours: dict[str, frozenset[str]], theirs: dict[str, frozenset[str]]
) -> None:
    recorded = {rule.name: frozenset({"namespace", "release"}) for group in GROUPS for rule in group.recordings}
    about = asked(expr)
    assert about.selectors
    possible = set(TARGET)
    for selector in about.selectors:
        known = {**theirs, **ours, **recorded}
        assert selector.name in known, f"nothing exports {selector.name}"
        labels = known[selector.name] | (TARGET if selector.name in ours else frozenset())
        assert selector.labels <= labels
        possible |= labels
        written = {f'{label}{operator}"{value}"' for label, operator, value in selector.matchers}
        assert ANY_NAMESPACE in written
        assert ANY_RELEASE in written or selector.name not in ours, "two releases must not alert for each other"
    assert about.grouped <= possible


def test_objectives_are_bounds_of_their_histograms() -> None:
    bounds = {metric.name: metric.bounds for metric in exported()}
    assert FIRST_TOKEN.value in bounds["temper_gateway_time_to_first_token_seconds"]
    assert BETWEEN_TOKENS.value in bounds["temper_gateway_inter_token_latency_seconds"]
    assert min(bounds["temper_gateway_inter_token_latency_seconds"]) == 0.0005
    for group in GROUPS:
        for rule in (*group.recordings, *group.alerts):
            for selector in asked(rule.expr).selectors:
                for label, operator, value in selector.matchers:
                    if label == "le":
                        assert operator == "="
                        assert float(value) in bounds[selector.name.removesuffix("_bucket")]


def test_names_are_unique_and_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    names = [alert.name for alert in ALERTS]
    assert len(set(names)) == len(names)
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == {*names, "README"}


@alerts
def test_a_runbook_says_what_to_see_and_what_to_do(alert: Alert) -> None:
    text = (RUNBOOKS / f"{alert.name}.md").read_text()
    assert text.startswith(f"# {alert.name}\n")
    assert re.search(r"^## See", text, re.MULTILINE)
    assert re.search(r"^## (Do|See and do)$", text, re.MULTILINE)


@pytest.mark.parametrize(
    "page", [*RUNBOOKS.glob("*.md"), ROOT / "docs/guides/monitoring.md"], ids=lambda page: page.stem
)
def test_variables_and_panels_that_a_page_names_exist(page: Path) -> None:
    known = (ROOT / "docs/guides/configuration.md").read_text()
    used = set(re.findall(r"TEMPER_[A-Z0-9_]*[A-Z0-9]", page.read_text()))
    # A client's, not a service's.
    assert {name for name in used if f"`{name}`" not in known} == set()


def test_an_alert_needs_a_case_that_fires_and_one_that_does_not() -> None:
    quiet = Case({"up": "1x10"}, "5m")
    with pytest.raises(ValueError, match="a case that fires"):
        Alert("TemperTired", "up == 0", 1, "info", "s", "d", (quiet,))
    with pytest.raises(ValueError, match="a name like"):
        Alert("x", "up == 0", 1, "info", "s", "d", (quiet,))


def test_every_threshold_is_in_a_rule_where_the_chart_finds_it() -> None:
    text = "".join(group.render() for group in GROUPS)
    for threshold in THRESHOLDS:
        found = re.findall(rf"([0-9.]+) # {threshold.name}$", text, re.M)
        assert set(found) == {f"{threshold.value:g}"}, threshold.name
