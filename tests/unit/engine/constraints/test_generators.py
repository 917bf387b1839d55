"""Default schemas of generators are enforced: zod 4, pydantic 2, TypeBox, and those of Java and Go.

`tests/fixtures/schemas/zod.json` has what `z.toJSONSchema` of zod 4 writes for each of its types.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema_rs
import pydantic
import pytest
from pydantic import BaseModel, Field, TypeAdapter

from services.engine.constraints.refusal import Refused
from services.engine.requests.sampling_params import SamplingParams
from tests.unit.engine.constraints.support import compiled, drawn, schema, text_of

ZOD: dict[str, Any] = json.loads((Path(__file__).parents[3] / "fixtures" / "schemas" / "zod.json").read_text())


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, lt=10)]


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Annotated[str, Field(min_length=1, max_length=8, pattern="^[a-z]+$")]


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


PYDANTIC: list[Any] = [
    int,
    str,
    float,
    bool,
    None,
    Any,
    bytes,
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    uuid.UUID,
    pydantic.UUID4,
    pathlib.Path,
    pydantic.FilePath,
    pydantic.DirectoryPath,
    re.Pattern,
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    ipaddress.IPv4Network,
    ipaddress.IPv6Network,
    ipaddress.IPv4Interface,
    ipaddress.IPv6Interface,
    pydantic.IPvAnyAddress,
    pydantic.IPvAnyNetwork,
    pydantic.IPvAnyInterface,
    pydantic.AnyUrl,
    pydantic.HttpUrl,
    pydantic.PostgresDsn,
    pydantic.SecretStr,
    pydantic.SecretBytes,
    pydantic.Json,
    pydantic.Base64Str,
    pydantic.Base64UrlStr,
    pydantic.ByteSize,
    pydantic.PastDate,
    pydantic.AwareDatetime,
    pydantic.PositiveInt,
    pydantic.NonNegativeFloat,
    Annotated[int, Field(ge=1, lt=10, multiple_of=3)],
    Annotated[float, Field(gt=0, le=0.5)],
    Annotated[list[int], Field(min_length=1, max_length=3)],
    set[Color],
    set[Literal["a", "b"]],
    tuple[int, str],
    tuple[int, ...],
    dict[str, int],
    dict[int, str],
    dict[Literal["a", "b"], int],
    dict[uuid.UUID, int],
    dict[Color, int],
    dict[Annotated[str, Field(pattern="^a")], int],
    int | str | None,
    Literal["a", 1, None],
    Color,
    Cat | Dog,
    Annotated[Cat | Dog, Field(discriminator="kind")],
    Tree,
    dict[str, list[Cat]],
    Annotated[int, Field(ge=-(2**63), le=2**63 - 1)],
]
OTHERS: dict[str, Any] = {
    "TypeBox recursive": {
        "$id": "T0",
        "type": "object",
        "properties": {"nodes": {"type": "array", "items": {"$ref": "T0"}}},
        "required": ["nodes"],
    },
    "TypeBox record": {"type": "object", "patternProperties": {"^(.*)$": {"type": "number"}}},
    "TypeBox union": {"anyOf": [{"const": "a", "type": "string"}, {"const": "b", "type": "string"}]},
    "TypeBox intersect": {
        "type": "object",
        "allOf": [
            {"type": "object", "required": ["x"], "properties": {"x": {"type": "number"}}},
            {"type": "object", "properties": {"y": {"type": "string"}}},
        ],
    },
    "TypeBox never": {"type": "object", "properties": {"n": {"not": {}}, "x": {"type": "null"}}, "required": ["x"]},
    "TypeBox integer": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740993},
    "victools": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {"Item-1": {"type": "object", "properties": {"id": {"type": "integer", "format": "int64"}}}},
        "properties": {
            "count": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            "first": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Item-1"}]},
            "second": {"allOf": [{"$ref": "#/$defs/Item-1"}, {"description": "the other"}]},
        },
    },
    "Jackson": {
        "id": "urn:jsonschema:a:B",
        "type": "object",
        "properties": {
            "map": {"type": "object", "additionalProperties": {"type": "string"}},
            "long": {"type": "integer"},
        },
    },
    "invopop": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://a.bc/x",
        "$ref": "#/$defs/User",
        "$defs": {
            "User": {
                "properties": {
                    "id": {"type": "integer"},
                    "at": {"type": "string", "format": "date-time"},
                    "raw": {"type": "string", "contentEncoding": "base64"},
                    "any": True,
                    "tags": {"patternProperties": {".*": {"type": "integer"}}, "type": "object"},
                },
                "additionalProperties": False,
                "type": "object",
                "required": ["id", "at"],
            }
        },
    },
    "schemars": {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "format": "uint32", "minimum": 0.0},
            "x": {"type": ["number", "null"], "format": "double"},
        },
    },
}


def check(wanted: dict[str, Any]) -> None:
    """Compiled, and what ends by itself is valid."""
    wrapped = {"type": "object", "properties": {"v": wanted}, "required": ["v"], "additionalProperties": False}
    nested = "$ref" in json.dumps(wanted)
    constraint = schema(wanted if nested else wrapped)
    grammar = compiled(constraint)
    validator = jsonschema_rs.validator_for(wanted if nested else wrapped, validate_formats=True)
    for seed in range(2):
        output = drawn(grammar.matcher(SamplingParams(constraint=constraint)), seed, 120)
        assert output is None or validator.is_valid(json.loads(text_of(output))), text_of(output)


@pytest.mark.parametrize("name", ZOD)
def test_zod(name: str) -> None:
    check(ZOD[name])


@pytest.mark.parametrize("number", range(len(PYDANTIC)))
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_pydantic(number: int, mode: Literal["validation", "serialization"]) -> None:
    check(TypeAdapter(PYDANTIC[number]).json_schema(mode=mode))


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    check(OTHERS[name])


def test_sets_of_any_values_are_refused_by_name() -> None:
    with pytest.raises(Refused, match="#: 'uniqueItems'"):
        check(TypeAdapter(set[int]).json_schema() | {"$defs": {"nested": {"$ref": "#"}}})
