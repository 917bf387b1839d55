"""Every combination, rendered once."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.chart.combinations import Values, combinations
from tests.chart.render import OURS, Rendered, merged, render
from tests.promtool import promtool  # noqa: F401 - a fixture

COMBINATIONS = combinations()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a release runs for each combination; `make test` has each choice alone, and few of the rows
    in which every two choices meet."""
    if "release" in metafunc.fixturenames:
        rows = [name for name in COMBINATIONS if " / " in name]
        left_out = set(rows) - set(rows[::8])
        names = [pytest.param(name, marks=[pytest.mark.thorough] * (name in left_out)) for name in COMBINATIONS]
        metafunc.parametrize("combination", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def releases() -> dict[str, Rendered]:
    return {}


@pytest.fixture(scope="session")
def combination(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def release(combination: str, releases: dict[str, Rendered]) -> Rendered:
    if combination not in releases:
        releases[combination] = render(COMBINATIONS[combination])
    return releases[combination]


@pytest.fixture
def values(combination: str) -> Mapping[str, object]:
    """Of the release, the chart's own included."""
    return merged(DEFAULTS, OURS, COMBINATIONS[combination])


def _defaults() -> Values:
    import yaml

    from tests.chart.render import CHART

    loaded: Values = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


DEFAULTS = _defaults()
