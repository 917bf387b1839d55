"""What is written about the chart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli.doctor.registry import CHECKS
from tests.chart.conftest import DEFAULTS
from tests.chart.render import CHART
from tests.chart.values_docs import SCHEMA, TARGET, described, descriptions, leaves, render

ROOT = CHART.parents[1]
PAGES = [TARGET, *sorted((ROOT / "docs").rglob("*.md"))]
_TOP = "|".join(key for key in DEFAULTS if key not in ("env", "test"))
_PATH = re.compile(rf"`(?!tls\.(?:crt|key)\b)((?:{_TOP})(?:\.[A-Za-z0-9]+)+)(?:[=:][^`]*)?`")

_CHECKS = {check.name for check in CHECKS}
"""Names of the doctor's checks, some of which read like values."""


def test_the_table_of_values_is_current() -> None:
    page = TARGET.read_text()
    assert page == render(page), "run `python -m tests.chart.values_docs`"


def test_the_schema_says_of_each_value_what_values_yaml_says() -> None:
    text = SCHEMA.read_text()
    assert text == described(text), "run `python -m tests.chart.values_docs`"


def test_descriptions_belong_to_values() -> None:
    paths = {path for path, _ in leaves(DEFAULTS)}
    above = {".".join(path.split(".")[:n]) for path in paths for n in range(1, 5)}
    assert len(descriptions()) > 60
    assert not set(descriptions()) - above


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_values_named_in_guides_exist(page: Path) -> None:
    for path in set(_PATH.findall(page.read_text())) - _CHECKS:
        found = DEFAULTS
        for key in path.split("."):
            assert isinstance(found, dict), path
            if not found:
                break  # a map of the user's own
            assert key in found, path
            found = found[key]
