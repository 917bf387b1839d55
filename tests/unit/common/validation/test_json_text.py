"""JSON of others is refused where what is kept of it could not be read again."""

from __future__ import annotations

import pytest
from pydantic_core import from_json

from services.common.validation.json_text import MOST_LEVELS, RepeatedKey, parsed_json


def nested(levels: int, inside: str = "") -> str:
    return '{"a":[' * (levels // 2) + inside + "]}" * (levels // 2)


def test_a_text_is_nested_up_to_the_limit() -> None:
    assert parsed_json(nested(MOST_LEVELS), allow_inf_nan=False)
    for levels in (MOST_LEVELS + 2, 200, 100_000):
        with pytest.raises(ValueError, match="nested more than 128 levels deep"):
            parsed_json(nested(levels), allow_inf_nan=False)


def test_many_lists_beside_each_other_are_not_deep() -> None:
    text = nested(MOST_LEVELS - 2, ",".join(["[]"] * 1000))
    assert parsed_json(text, allow_inf_nan=False) == from_json(text)
    assert parsed_json('"' + "[" * 1000 + '"', allow_inf_nan=False) == "[" * 1000


MANY = "[" + "[]," * 200 + "[]]"


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "1,2", "]", "1]", "]" * 300 + "[" * 300, f"{MANY},{MANY}", f"{MANY}]", f"x{MANY}", f"{MANY[:-1]}"),
        *(f'{{"a": "\\ud800", "b": {MANY}}}', f'{{"a": {MANY}\n, b}}', f"[NaN,{MANY}", f"[{'1' * 5000},{MANY}]"),
    ],
)
def test_errors_are_those_of_the_text_itself(text: str) -> None:
    with pytest.raises(ValueError) as plain:
        from_json(text)
    with pytest.raises(ValueError) as ours:
        parsed_json(text, allow_inf_nan=True)
    assert str(ours.value) == str(plain.value)


def test_bytes_and_numbers_that_are_none() -> None:
    assert parsed_json(b"[NaN]", allow_inf_nan=True) != [None]
    for bad in (b"[NaN]", b'"\xff"', "\ud800", f'["\ud800",{MANY}]'):
        with pytest.raises(ValueError):
            parsed_json(bad, allow_inf_nan=False)


@pytest.mark.parametrize("inside", ["%s", f"[{MANY}, %s]"])
@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"a": 1, "b": 2, "a": 1}', "a"),
        ('{"a": {"b": [0, {"c": [], "\\u0063": {}}]}}', "a.b[1].c"),
        ('{"a": 1, "A": {"": 1, "": 2}}', "A."),
        ('{"a": "\\"a\\": 1", "' + "x" * 10_000 + '": 1, "' + "x" * 10_000 + '": 1}', "x" * 80),
    ],
)
def test_a_key_that_is_there_twice_is_named(text: str, place: str, inside: str) -> None:
    """Which of the values counts differs from reader to reader."""
    with pytest.raises(RepeatedKey, match="is there twice: leave one of them out") as refused:
        parsed_json(inside % text, allow_inf_nan=False)
    assert refused.value.place.removeprefix("[1]").removeprefix(".").startswith(place)
    assert len(refused.value.place) <= 204


def test_what_is_no_json_is_told_before_a_key_that_is_there_twice() -> None:
    for text, says in (
        ('{"a": 1, "a": 2', "EOF"),
        ('{"a": 1, "a": NaN}', "expected value"),
        ('{"a":1,"a":' + "[" * 500, "deep"),
    ):
        with pytest.raises(ValueError, match=says) as refused:
            parsed_json(text, allow_inf_nan=False)
        assert not isinstance(refused.value, RepeatedKey)


def test_a_key_may_be_in_many_objects() -> None:
    text = '[{"a": 1, "b": {"a": 2}}, {"a": "a", "b": ["a", "a"]}]'
    assert parsed_json(text, allow_inf_nan=False) == from_json(text)
