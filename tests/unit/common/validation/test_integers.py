"""What JSON Schema calls an integer is one, and nothing else is."""

from __future__ import annotations

import json
from typing import Any, Generic, TypeVar

import pytest
from pydantic import ConfigDict, Field, ValidationError, model_validator

from services.common.validation.integers import JsonIntegers

T = TypeVar("T")


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


class More(Outer):
    """Fields of its own beside inherited ones, models in it that refer to each other, and one that is checked."""

    steps: int = 1
    tree: Tree | None = None
    choice: Inner | Checked | None = None


class Tree(JsonIntegers):
    model_config = ConfigDict(strict=True)
    size: int = 1
    below: list[Tree] = Field(default_factory=list)
    beside: Checked | None = None


class Checked(JsonIntegers):
    model_config = ConfigDict(strict=True, extra="forbid")
    width: int
    tree: Tree | None = None

    @model_validator(mode="after")
    def _check(self) -> Checked:
        return self


class Paged(JsonIntegers, Generic[T]):
    model_config = ConfigDict(strict=True)
    total: int = 0
    rows: list[T] = Field(default_factory=list)


@pytest.mark.parametrize(
    "given",
    [
        {"limit": 3, "inner": {"count": 4}, "steps": 2},
        {"tree": {"size": 1, "below": [{"size": 2, "below": [{"size": 3, "beside": {"width": 4}}]}]}},
        {"choice": {"width": 1, "tree": {"size": 2, "below": [{"size": 3}]}}},
        {"choice": {"count": 5}},
    ],
)
def test_so_are_those_of_models_in_models(given: dict[str, Any]) -> None:
    floats = json.loads(json.dumps(given), parse_int=float)
    found = More.model_validate(floats).model_dump(exclude_unset=True)
    assert repr(found) == repr(given)
    page = Paged[More].model_validate({"total": 2.0, "rows": [floats, floats]}).model_dump(exclude_unset=True)
    assert repr(page) == repr({"total": 2, "rows": [given, given]})


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
