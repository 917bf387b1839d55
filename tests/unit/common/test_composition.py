"""Texts of compositions, and the same as JSON Schema says them."""

from __future__ import annotations

import re

import pytest

from services.common.adapters.composition import (
    COMPOSITION_SCHEMA,
    FIXED_SCHEMA,
    Composition,
    Member,
    parse_composition,
    parse_published,
)
from services.common.adapters.names import AdapterVersion
from services.common.errors import InvalidRequest

GOOD = {
    "a": "a",
    "a@3": "a@3",
    "b+a": "a+b",
    "a@10+a@9": "a@9+a@10",
    "a@3*0.7+b.2-x": "a@3*0.7+b.2-x",
    "a*-1+b*1.0": "a*-1+b",
    "a*0.000001": "a*0.000001",
    "a*100": "a*100",
    "+".join(f"n{n:02}" for n in range(16)): "+".join(f"n{n:02}" for n in range(16)),
}
BAD = (
    *("", "a+", "+a", "a++b", "base+a", "base*2", "a*", "a*0", "a*0.0", "a*0.0000001", "a*101", "a*1e2", "a*nan"),
    *("a@0", "a*0.5@3", "a b", "a..b", "a*٣", "+".join(f"n{n:02}" for n in range(17))),
)


def test_equal_compositions_are_one_text() -> None:
    assert {text: str(parse_composition(text)) for text in GOOD} == GOOD
    for text in GOOD.values():
        assert parse_composition(text) == parse_composition(str(parse_composition(text)))
    tiny = Composition.of([Member("a", 3, 0.1 + 0.2), Member("b", None, 1.2345e-05)])
    assert str(tiny) == "a@3*0.30000000000000004+b*0.000012345"
    assert parse_composition(str(tiny)) == tiny


@pytest.mark.parametrize("text", BAD)
def test_what_is_malformed_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_composition(text)
    assert not re.search(COMPOSITION_SCHEMA["pattern"], text)


def test_the_schema_takes_what_the_parser_takes() -> None:
    for text in (*GOOD, *GOOD.values(), "base"):
        assert re.search(COMPOSITION_SCHEMA["pattern"], text), text
    assert re.search(FIXED_SCHEMA["pattern"], "a@3*0.7+b@1")
    assert not re.search(FIXED_SCHEMA["pattern"], "a@3*0.7+b")


def test_an_adapter_that_is_named_twice_is_refused() -> None:
    for text in ("a@3+b+a@3*0.5", "a@3*0.5+b+a", "a+a*2"):  # `a` may be a@3 by then
        with pytest.raises(InvalidRequest, match=r"is named twice \(also as a"):
            parse_composition(text)


def test_what_stays_as_it_is_names_its_versions() -> None:
    assert parse_published("a@3") == AdapterVersion("a", 3)
    assert str(parse_published("b@1+a@3*0.5")) == "a@3*0.5+b@1"
    with pytest.raises(InvalidRequest, match=r"must name a version, as in b@1"):
        parse_published("a@3+b")
