"""Rules as JSON Schema: null counts as not given, and they hold in what inherits them."""

from __future__ import annotations

from typing import Any, ClassVar

import jsonschema_rs
import pytest

from services.common.validation.json_rules import (
    NONE,
    SOME,
    Rule,
    Ruled,
    Rules,
    at_least_one,
    at_most_one,
    both,
    contains,
    either,
    exactly_one,
    given,
    has,
    if_any,
    items,
    left_out,
    never,
    only_with,
    true_only_with,
    where,
)

CASES: list[tuple[Rule, list[Any], list[Any]]] = [
    (given("a", "b"), [{"a": 1, "b": ""}, {"a": 0, "b": [], "c": None}], [{}, {"a": 1}, {"a": 1, "b": None}, 5, None]),
    (left_out("a", "b"), [{}, {"a": None}, {"c": 1}], [{"a": 0}, {"b": False}]),
    (has(a=True), [{"a": True}], [{}, {"a": False}, {"a": None}, None]),
    (has(a=SOME), [{"a": [None]}], [{}, {"a": []}, {"a": None}]),
    (if_any(a="x"), [{}, {"a": "x"}], [{"a": "y"}, {"a": None}]),
    (if_any(a=NONE), [{}, {"a": None}, {"a": []}], [{"a": [1]}, {"a": 1}]),
    (either(given("a"), given("b")), [{"a": 1}, {"a": 1, "b": 1}], [{}]),
    (both(given("a"), left_out("b")), [{"a": 1, "b": None}], [{"a": 1, "b": 1}, {}]),
    (never(given("a")), [{}, {"a": None}], [{"a": 1}]),
    (
        exactly_one("a", "b", "c"),
        [{"a": 1}, {"c": 1, "b": None}],
        [{}, {"a": None}, {"a": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}],
    ),
    (at_least_one("a", "b"), [{"a": 1}, {"a": 1, "b": 1}, {"a": None, "b": 1}], [{}, {"a": None}]),
    (at_most_one("a", "b", "c"), [{}, {"a": 1}, {"a": 1, "b": None}], [{"a": 1, "b": 1}, {"b": 1, "c": 1}]),
    (only_with("a", given("b")), [{}, {"a": None}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}, {"a": 1, "b": None}]),
    (true_only_with("a", given("b")), [{}, {"a": False}, {"a": True, "b": 1}], [{"a": True}, {"a": True, "b": None}]),
    (where(has(a=1), left_out("b")), [{"a": 1}, {"a": 2, "b": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    (has(a=items(given("b"))), [{"a": []}, {"a": [{"b": 1}]}], [{"a": [{"b": 1}, {}]}, {"a": ["text"]}]),
    (has(a=contains(has(b=1))), [{"a": [{}, {"b": 1}]}], [{"a": []}, {"a": [{"b": 2}]}, {"a": None}]),
]


@pytest.mark.parametrize(("rule", "kept", "broken"), CASES)
def test_a_rule_says_what_it_is_called(rule: Rule, kept: list[Any], broken: list[Any]) -> None:
    validator = jsonschema_rs.validator_for(rule)
    assert [value for value in kept if not validator.is_valid(value)] == []
    assert [value for value in broken if validator.is_valid(value)] == []


class Base(Ruled):
    a: int | None = None
    b: int | None = None

    json_rules: ClassVar[Rules] = (at_most_one("a", "b"),)


class Child(Base):
    c: int | None = None

    json_rules: ClassVar[Rules] = (only_with("c", given("a")), at_least_one("a", "b", "c"))


class Grandchild(Child):
    d: Base | None = None


@pytest.mark.parametrize("model", [Child, Grandchild])
def test_the_rules_of_bases_hold_too(model: type[Child]) -> None:
    validator = jsonschema_rs.validator_for(model.model_json_schema())
    for value in ({"a": 1}, {"b": 1}, {"a": 1, "c": 1}):
        assert validator.is_valid(value), value
    for value in ({}, {"a": 1, "b": 1}, {"c": 1}, {"b": 1, "c": 1}):
        assert not validator.is_valid(value), value


def test_a_model_inside_another_has_its_rules() -> None:
    validator = jsonschema_rs.validator_for(Grandchild.model_json_schema())
    assert validator.is_valid({"a": 1, "d": {"b": 1}})
    assert not validator.is_valid({"a": 1, "d": {"a": 1, "b": 1}})


def test_what_no_rule_bars_is_not_split() -> None:
    """Several rules that bar something are one `not`."""
    assert list(Base.model_json_schema()["not"]) == ["anyOf"]
    described = Child.model_json_schema()
    assert len(described["not"]["anyOf"]) == 2
    assert len(described["allOf"]) == 1
