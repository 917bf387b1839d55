"""Every pair of values renders, and what it renders parses; or it is refused in words that name a value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import pytest

from tests.chart.conftest import DEFAULTS
from tests.chart.fragments import fragments
from tests.chart.pairs import QUIET, Pairs
from tests.chart.render import OURS, files
from tests.chart.values_docs import SCHEMA

FRAGMENTS = fragments(DEFAULTS)
_TOGETHER = {"if", "allOf", "oneOf", "dependencies", "dependentRequired", "dependentSchemas"}
"""With these, and with `not` or `anyOf` above other values, a schema could say something of two values."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(FRAGMENTS, tmp_path_factory.mktemp("charts"))


@pytest.mark.sampled(60)
@pytest.mark.parametrize("name", FRAGMENTS)
def test_every_value_renders_alone(name: str, pairs: Pairs) -> None:
    assert FRAGMENTS[name]
    assert files(OURS, QUIET, FRAGMENTS[name]), "the schema takes it"
    assert pairs.told([name]) == ""


def test_there_is_every_value() -> None:
    assert len(FRAGMENTS) > 200


def _nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(schema, Mapping):
        yield schema
    for below in schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ():
        yield from _nodes(below)


def test_the_schema_looks_at_each_value_alone() -> None:
    """So values that it takes one by one it takes together: pairs are tried without it."""
    nodes = list(_nodes(json.loads(SCHEMA.read_text())))
    assert len(nodes) > 200
    assert not [node for node in nodes if _TOGETHER & set(node)]
    assert not [node for node in nodes if {"not", "anyOf"} & set(node) and "properties" in str(node)]


@pytest.mark.thorough
def test_every_pair_renders(pairs: Pairs) -> None:
    """`python -m tests.chart.matrix --pairs` takes exactly two at a time."""
    assert pairs.wrong() == {}
    assert pairs.contradictions, "some are known to be there"


BROKEN = """
{{- if and .Values.gateway.replicas .Values.networkPolicy.dnsTo (eq .Values.engine.servedModelName "other") }}
a: [
{{- end }}
"""
"""Of two values, and of one more that is there by default."""


def test_a_pair_that_breaks_is_found_and_a_contradiction_is_none(tmp_path: Path) -> None:
    """Or the test above would prove nothing."""
    names = [name for name in FRAGMENTS if name.startswith(("networkPolicy.", "tls.", "engine.quant", "engine.dev"))]
    values = {name: FRAGMENTS[name] for name in names} | {"model": {"engine": {"servedModelName": "other"}}}
    tried = Pairs({name: value for name, value in values.items() if name != "engine.servedModelName"}, tmp_path)
    assert tried.told(["networkPolicy.dnsTo", "model"]) == ""
    copy = tmp_path / "templates" / "templates" / "network.yaml"
    copy.write_text(copy.read_text() + BROKEN)
    with helm_python.Chart.load(tmp_path / "templates") as broken:
        tried._templates = broken
        found = tried.wrong()
        assert {frozenset(pair) for pair in found} == {frozenset(("networkPolicy.dnsTo", "model"))}
        assert tried.contradictions
        assert {tried.told(sorted(pair)) for pair in tried.contradictions} == {None}
