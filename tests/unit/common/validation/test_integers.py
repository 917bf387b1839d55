"""What JSON Schema calls an integer is one, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ConfigDict, Field, ValidationError

from services.common.validation.integers import JsonIntegers


class Inner(JsonIntegers):
    model_config = ConfigDict(strict=True)
    count: int = Field(1, ge=1)


class Outer(JsonIntegers):
    model_config = ConfigDict(strict=True)
    limit: int | None = None
    ids: list[int] = Field(default_factory=list)
    prompts: str | list[int] | list[list[int]] = ""
    share: float = 0.5
    inner: Inner = Inner()
    by_name: dict[str, int] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"limit": 16.0}, {"limit": 16}),
        ({"limit": -0.0}, {"limit": 0}),
        ({"ids": [1, 2.0, 3]}, {"ids": [1, 2, 3]}),
        ({"prompts": [[1.0], [2]]}, {"prompts": [[1], [2]]}),
        ({"inner": {"count": 3.0}}, {"inner": {"count": 3}}),
        ({"by_name": {"a": 2.0}}, {"by_name": {"a": 2}}),
        ({"share": 2.0}, {"share": 2.0}),
    ],
)
def test_integral_floats_are_integers(given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = Outer.model_validate(given).model_dump(exclude_unset=True)
    assert found == expected
    assert repr(found) == repr(expected), "of the same types"


@pytest.mark.parametrize(
    "given",
    [
        {"limit": 1.5},
        {"limit": True},
        {"limit": "16"},
        {"limit": float("inf")},
        {"limit": float("nan")},
        {"ids": [1, 2.5]},
        {"ids": [1, True]},
        {"prompts": [["1"]]},
        {"inner": {"count": 0.0}},
    ],
)
def test_nothing_else_is(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Outer.model_validate(given)


def test_the_description_is_that_of_an_integer() -> None:
    fields = Outer.model_json_schema()["properties"]
    assert fields["limit"]["anyOf"][0] == {"type": "integer"}
    assert fields["ids"]["items"] == {"type": "integer"}
