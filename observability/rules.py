"""Recording rules and alerts as data, with the cases that promtool tests them by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import yaml

from observability.render import RUNBOOKS

Severity: TypeAlias = Literal["critical", "warning", "info"]
"""critical: somebody has to look now. warning: today. info: good to know."""
_NAME = re.compile(r"Temper[A-Z][A-Za-z]+")
_TEMPLATE = re.compile(r"{{\s*(\$[^}|]+?)\s*(?:\|[^}]*)?}}")


@dataclass(frozen=True, slots=True)
class Firing:
    """Alert that a case expects."""

    labels: Mapping[str, str]
    """Labels without the alert's name and severity."""
    value: str = ""
    """Value as the text shows it."""


@dataclass(frozen=True, slots=True)
class Case:
    """Series, and what comes of them."""

    series: Mapping[str, str]
    """Series → values a minute apart, in promtool's notation."""
    at: str
    """Time of the evaluation: "12m"."""
    firing: tuple[Firing, ...] = ()
    """Expected alerts; empty: none fires."""


@dataclass(frozen=True, slots=True)
class Alert:
    """Alert. Its runbook is docs/runbooks/{name}.md.

    Raises:
        ValueError: it is not complete, or has no case that fires or none that does not.
    """

    name: str
    expr: str
    minutes: int
    """Time for which the expression must hold before the alert fires."""
    severity: Severity
    summary: str
    """Problem, in one line."""
    description: str
    """Description with numbers, and what users notice."""
    cases: tuple[Case, ...]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or not self.summary or not self.description:
            raise ValueError(f"alert {self.name!r} needs a name like TemperEngineDown, a summary and a description")
        if {bool(case.firing) for case in self.cases} != {True, False}:
            raise ValueError(f"alert {self.name}: it needs a case that fires and one that does not")

    def rule(self) -> dict[str, Any]:
        """Alert in the format of Prometheus."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": f"{self.minutes}m",
            "labels": {"severity": self.severity},
            "annotations": self._annotations(),
        }

    def test(self, case: Case) -> dict[str, Any]:
        """Test cases for promtool."""
        expected = [
            {
                "exp_labels": {**firing.labels, "severity": self.severity},
                "exp_annotations": {name: _filled(text, firing) for name, text in self._annotations().items()},
            }
            for firing in case.firing
        ]
        return {
            "interval": "1m",
            "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
            "alert_rule_test": [{"eval_time": case.at, "alertname": self.name, "exp_alerts": expected}],
        }

    def _annotations(self) -> dict[str, str]:
        return {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": f"{RUNBOOKS}/{self.name}.md",
        }


@dataclass(frozen=True, slots=True)
class Recording:
    """A query that is asked so often or so far back that its answer is kept."""

    name: str
    expr: str

    def rule(self) -> dict[str, Any]:
        """Recording rule in the format of Prometheus."""
        return {"record": self.name, "expr": self.expr}


@dataclass(frozen=True, slots=True)
class Group:
    """File of rules."""

    name: str
    alerts: tuple[Alert, ...]
    recordings: tuple[Recording, ...] = field(default=())

    def render(self) -> str:
        """The file's content."""
        rules = [*(rule.rule() for rule in self.recordings), *(alert.rule() for alert in self.alerts)]
        text = yaml.dump(
            {"groups": [{"name": f"temper.{self.name}", "rules": rules}]},
            Dumper=_Readable,
            sort_keys=False,
            width=1_000_000,
        )
        return f"# Written by `python -m observability.generate`; change observability/alerts, not this file.\n{text}"

    def tests(self, file: str) -> str:
        """promtool's unit tests of the rules in ``file``."""
        tests = [alert.test(case) for alert in self.alerts for case in alert.cases]
        return yaml.dump({"rule_files": [file], "evaluation_interval": "1m", "tests": tests}, Dumper=_Readable)


def _filled(text: str, firing: Firing) -> str:
    """A text as Prometheus fills it in for one alert."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        return firing.value if name == "$value" else firing.labels.get(name.removeprefix("$labels."), "")

    return _TEMPLATE.sub(fill, text)


class _Readable(yaml.SafeDumper):
    """Expressions of several lines as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class' signature
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # As a block a query keeps its quotes as they are, so the chart can replace matchers in the text.
    style = "|" if '"' in value or "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Readable.add_representer(str, _text)
