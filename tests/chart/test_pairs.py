"""Every pair of values renders, and what it renders parses; or it is refused in words that name a value."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Iterator, Sequence

import helm_python
import pytest
import yaml

from tests.chart.conftest import DEFAULTS
from tests.chart.fragments import fragments
from tests.chart.render import OURS, documents, files

FRAGMENTS = fragments(DEFAULTS)
QUIET = {"monitoring": {"dashboards": False}}
"""Dashboards are a megabyte of text that no other value changes; test_monitoring.py looks at them."""
NAMED = re.compile(r"\b(?:global|gateway|engine|redis|objectStore|tls|telemetry|test)(?:\.[a-zA-Z0-9]+)+ |extraEnv: ")
GROUP = 12


@functools.cache
def _parse(text: str) -> tuple[tuple[str, str], ...]:
    """Kind and name of each document; equal texts are parsed once."""
    return tuple((one["kind"], one["metadata"]["name"]) for one in documents(text))


def told(names: Sequence[str]) -> str | None:
    """What is wrong with these values together; None: they contradict each other, and a value is named."""
    try:
        texts = files(OURS, QUIET, *(FRAGMENTS[name] for name in names))
    except helm_python.HelmValuesError as error:
        return f"the schema refuses it: {error}"
    except helm_python.HelmError as error:
        return None if NAMED.search(str(error)) else str(error)
    objects: list[tuple[str, str]] = []
    for path, text in texts.items():
        if path.endswith(".yaml"):
            try:
                objects += _parse(text)
            except (yaml.YAMLError, TypeError, KeyError) as error:
                return f"{path}: {error}"
    return "" if len(set(objects)) == len(objects) else "two objects have one name"


def _wrong(one: Sequence[str], other: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Renders every pair of a value of one group and a value of the other, as many at once as do not contradict."""
    names = (*one, *other)
    problem = told(names)
    if problem == "" or (problem is None and len(names) == 2):
        return
    if problem and len(names) == 2:
        yield names, problem
    elif len(one) >= len(other):
        yield from _wrong(one[: len(one) // 2], other)
        yield from _wrong(one[len(one) // 2 :], other)
    else:
        yield from _wrong(one, other[: len(other) // 2])
        yield from _wrong(one, other[len(other) // 2 :])


@pytest.mark.parametrize("name", FRAGMENTS)
def test_every_value_renders_alone(name: str) -> None:
    assert FRAGMENTS[name]
    assert told([name]) == ""


def test_there_is_every_value() -> None:
    assert len(FRAGMENTS) > 200


def test_every_pair_renders() -> None:
    """Few values at a time beside defaults, so that a third value hides nothing: `python -m tests.chart.matrix --pairs`
    takes exactly two."""
    names = list(FRAGMENTS)
    random.Random(1).shuffle(names)
    groups = [names[start : start + GROUP] for start in range(0, len(names), GROUP)]
    wrong = dict(entry for one, other in itertools.combinations(groups, 2) for entry in _wrong(one, other))
    for group in groups:
        half = len(group) // 2
        wrong |= dict(_wrong(group[:half], group[half:]))
    assert wrong == {}
