"""Every pair of values renders, and what it renders parses; or it is refused in words that name a value."""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections.abc import Mapping, Sequence

import helm_python
import pytest

from tests.chart.conftest import DEFAULTS
from tests.chart.fragments import fragments
from tests.chart.render import OURS, documents, files, merged

FRAGMENTS = fragments(DEFAULTS)
QUIET = {"monitoring": {"dashboards": False}}
"""Dashboards are a megabyte of text that no other value changes; test_monitoring.py looks at them."""
PATH = re.compile(r"\b(?:global|gateway|engine|redis|objectStore|tls|telemetry|test|networkPolicy)\.[a-zA-Z]")


@functools.cache
def _parse(text: str) -> tuple[tuple[str, str], ...]:
    """Kind and name of each document; equal texts are parsed once."""
    return tuple((one["kind"], one["metadata"]["name"]) for one in documents(text))


def _render(*names: str) -> str:
    """What is wrong; empty: nothing."""
    values = merged(OURS, QUIET, *(FRAGMENTS[name] for name in names))
    try:
        texts = files(values)
    except helm_python.HelmValuesError as error:
        return f"the schema refuses it: {error}"
    except helm_python.HelmError as error:
        return "" if PATH.search(str(error)) and "_validate.tpl" in str(error) else str(error)
    objects: list[tuple[str, str]] = []
    for path, text in texts.items():
        if path.endswith(".yaml"):
            try:
                objects += _parse(text)
            except Exception as error:
                return f"{path}: {error}"
    return "" if len(set(objects)) == len(objects) else "two objects have one name"


@pytest.mark.parametrize("name", FRAGMENTS)
def test_every_value_renders_alone(name: str) -> None:
    values = merged(OURS, QUIET, FRAGMENTS[name])
    assert any(_parse(text) for path, text in files(values).items() if path.endswith(".yaml"))


def test_every_value_changes_something() -> None:
    """Or the pairs would prove nothing; passwords are given, as they are drawn anew each time."""
    given: Mapping[str, object] = {"redis": {"existingSecret": "r"}, "objectStore": {"existingSecret": "s"}}
    without = [name for name, values in FRAGMENTS.items() if not values]
    assert without == []
    assert len(FRAGMENTS) > 180
    assert files(OURS, QUIET, given) == files(OURS, QUIET, given)


def covering(names: Sequence[str], seconds: float) -> int:
    """Renders pairs, and says how many."""
    raise NotImplementedError


def test_every_pair_renders() -> None:
    started = time.monotonic()
    wrong = {pair: told for pair in itertools.combinations(FRAGMENTS, 2) if (told := _render(*pair))}
    assert wrong == {}, f"{len(wrong)} pairs, after {time.monotonic() - started:.0f} s"
