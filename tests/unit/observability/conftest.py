from __future__ import annotations

import pytest

from observability.catalogue import exported
from observability.foreign import FOREIGN
from tests.promtool import promtool  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def ours() -> dict[str, frozenset[str]]:
    """Sample names that our code exports, with their labels."""
    found: dict[str, frozenset[str]] = {}
    for metric in exported():
        for name in metric.sample_names:
            found[name] = found.get(name, frozenset()) | metric.labels_of(name)
    return found


@pytest.fixture(scope="session")
def theirs() -> dict[str, frozenset[str]]:
    """The same of other exporters."""
    return {name: labels for other in FOREIGN for name, labels in other.series.items()}
