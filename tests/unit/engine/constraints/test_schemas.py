"""Grammars of JSON schemas: accepted outputs and refusals with their place, keyword by keyword and at their edges."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.engine.constraints.refusal import Refused
from services.engine.constraints.schema.compiling import grammar_of, parsed
from services.engine.constraints.schema.probe import Probe
from tests.unit.engine.constraints.compiling import takes
from tests.unit.engine.constraints.support import compiled, schema

Case = tuple[dict[str, Any], list[str], list[str]]
BIG = 10**40


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    wanted = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, "additionalProperties": False, **wanted}


NUMBERS: list[Case] = [
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.25"], ["0", "0.0", "0.51"]),
    ({"type": "integer", "minimum": 0.5, "maximum": 1.5}, ["1"], ["0", "2"]),
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, [str(2**53 + 1)], [str(2**53)]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [str(-(2**63))], [str(2**63)]),
    ({"type": "integer", "exclusiveMinimum": 2**64 - 2, "maximum": 2**64 - 1}, [str(2**64 - 1)], [str(2**64 - 2)]),
    ({"type": "integer", "multipleOf": 10**20, "minimum": BIG}, [str(BIG + 10**20)], [str(BIG + 1)]),
    (
        {"type": "number", "multipleOf": 0.01, "exclusiveMinimum": 0, "maximum": 1},
        ["0.99", "1"],
        ["0", "0.015", "1.01"],
    ),
    ({"type": "array", "items": {"type": "integer", "multipleOf": 7}}, ["[7, -14,0]", "[700 ]"], ["[8]", "[   7]"]),
    ({"type": "number", "multipleOf": 1.5, "minimum": 0}, ["1.5", "300"], ["-1.5", "1.6"]),
    (
        {"type": "number", "multipleOf": 3.3},
        ["3.3", "-6.6", "33"],
        ["3.4", "190407776316066906439140.2", "-2971597990907372368875913928509128.0"],
    ),
    (
        {"type": "number", "minimum": 4.9e-324, "maximum": 1.7976931348623157e308},
        ["0.5", "1797693134862315"],
        ["0", "-0.5"],
    ),
    (
        {"allOf": [{"type": "integer", "minimum": 0, "maximum": 5}, {"multipleOf": 2}, {"multipleOf": 3}]},
        ["0"],
        ["2", "6"],
    ),
    ({"const": -0.0}, ["0"], ["1"]),
    ({"enum": [BIG, 2**63, 1.0]}, [str(BIG), "1"], [str(BIG + 1), str(2**63 + 1)]),
    (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "integer",
            "minimum": 0,
            "exclusiveMinimum": True,
        },
        ["1"],
        ["0"],
    ),
    ({"type": ["integer", "null"], "format": "int32"}, ["null", "2147483647"], ["2147483648"]),
]
STRINGS: list[Case] = [
    ({"enum": ["\x7f", "\x00\x1f\u2028"]}, ['"\x7f"', '"\\u0000\\u001f\u2028"'], ['""']),
    ({"type": "object", "properties": {"\x7f": {"type": "null"}}}, ['{"\x7f":null}'], ['{"\x7f":1}']),
    ({"type": "string"}, ['"\\/"', '"\\u0041"', '"\\ud83d\\ude00"'], ['"\\ud800"', '"\\udc00"', '"\n"']),
    ({"type": "string", "maxLength": 1}, ['"😀"', '"\\ud83d\\ude00"', '"\\n"', '""'], ['"ab"', '"\\ud83d"']),
    ({"type": "string", "pattern": "^[^\\s]{2}$"}, ['"ab"'], ['":\u00a0"', '": "', '"a\\n"']),
    ({"type": "string", "pattern": "^.$"}, ['"\\t"'], ['"\\n"', '"\u2028"']),
    ({"type": "string", "pattern": "^[a-z]*$", "minLength": 2, "maxLength": 3}, ['"abc"'], ['"a"', '"abcd"', '"AB"']),
    ({"type": "string", "not": {"enum": ["a", "b"]}}, ['"c"', '""'], ['"a"', '"\\u0061"', "1"]),
    ({"type": "string", "not": {"pattern": "^a"}}, ['"b"', '""'], ['"ab"']),
    ({"type": "string", "pattern": "^(?!\\.)(?!.*\\.\\.)[a-z.]+@x$"}, ['"a.b@x"'], ['".a@x"', '"a..b@x"']),
    ({"type": "string", "format": "starts_with", "pattern": "^ab.*"}, ['"abc"'], ['"bc"']),
    # What a pattern says holds, where the format beside it contradicts it: zod's times have no zone.
    ({"type": "string", "format": "time", "pattern": "^\\d\\d:\\d\\d$"}, ['"10:00"'], ['"10:00:00Z"']),
    ({"type": "string", "format": "time", "pattern": "^1"}, ['"10:00:00Z"'], ['"10:00"', '"20:00:00Z"']),
    ({"enum": ["a", "bb", 1], "maxLength": 1}, ['"a"', "1"], ['"bb"']),
]
OBJECTS: list[Case] = [
    (
        {"properties": {"a": {"type": "integer"}}, "type": "object"},
        ['{"a":1,"b":"x"}', '{ "a": 1}'],
        ['{"a":"x"}', '{"a":1,"a":2}', '{"\\u0061":null}', '{"a":1,"\\u0061":null}'],
    ),
    (
        {"properties": {"a\n": {"type": "integer"}}, "type": "object"},
        ['{"a\\n":1}'],
        ['{"a\\u000a":"x"}', '{"\\u0061\\n":1}'],
    ),
    (
        {"properties": {'"/é😀': {"type": "integer"}}, "type": "object"},
        ['{"\\"/é😀":1}'],
        ['{"\\u0022/é😀":""}', '{"\\"\\/é😀":""}', '{"\\"/\\u00e9😀":""}', '{"\\"/é\\ud83d\\ude00":""}'],
    ),
    (
        {
            "type": "object",
            "patternProperties": {"^a": {"type": "integer"}},
            "additionalProperties": {"type": "string"},
        },
        ['{"ab":1,"b":"x"}'],
        ['{"ab":"x"}', '{"\\u0061b":"x"}', '{"b":1}'],
    ),
    (
        {
            "type": "object",
            "patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 5}},
            "additionalProperties": False,
        },
        ['{"a":1,"ab":7}', "{}"],
        ['{"ab":1}', '{"c":1}'],
    ),
    (
        closed("score", score={"type": "integer"}) | {"patternProperties": {"^score$": {"minimum": 2}}},
        ['{"score":2}'],
        ['{"score":1}', "{}"],
    ),
    (
        {
            "type": "object",
            "patternProperties": {"^[ab]$": {"type": "integer"}},
            "additionalProperties": False,
            "minProperties": 2,
            "maxProperties": 2,
        },
        ['{"a":1,"b":2}'],
        ['{"a":1,"a":2}', '{"a":1}'],
    ),
    (closed(a={}, b={}, c={}) | {"minProperties": 2}, ['{"a":1,"c":1}', '{"b":1,"c":1}'], ['{"a":1}', "{}"]),
    (closed("c", a={}, b={}, c={}) | {"maxProperties": 2}, ['{"a":1,"c":1}', '{"c":1}'], ['{"a":1,"b":1,"c":1}']),
    ({"type": "object", "minProperties": 1, "maxProperties": 1}, ['{"a":1}'], ["{}", '{"a":1,"b":2}']),
    (
        {"type": "object", "required": ["z"], "additionalProperties": {"type": "integer"}},
        ['{"z":1,"y":2}'],
        ['{"y":1}', '{"z":"a"}'],
    ),
    ({"required": ["z"]}, ['{"z":1}', "1"], ["{}"]),
    (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        ['{"a":1}', "{}"],
        ['{"a":"x"}'],
    ),
    ({"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {}}, ['{"ab":1}'], ['{"abc":1}']),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "minProperties": 2},
        ['{"a":1,"b":1}'],
        ['{"a":1,"a":1}'],
    ),
    ({"type": "object", "propertyNames": {"not": {"const": "a"}}}, ['{"b":1}'], ['{"a":1}', '{"\\u0061":1}']),
    ({"type": "object", "propertyNames": False}, ["{}"], ['{"a":1}']),
    (closed(a={}, b={}) | {"dependentRequired": {"a": ["b"]}}, ['{"b":1}', '{"a":1,"b":2}', "{}"], ['{"a":1}']),
    (
        closed(a={}, b={}) | {"dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}}},
        ['{"a":1,"b":null}', '{"b":1}'],
        ['{"a":1,"b":1}'],
    ),
    (closed("b", a={"not": {}}, b={}), ['{"b":1}'], ['{"a":1,"b":1}']),
    ({"unevaluatedProperties": False, "type": "object", "properties": {"a": {}}}, ['{"a":1}'], ['{"b":1}']),
    ({"const": {"a": [1, "x"], "b": {}}}, ['{"a":[1,"x"],"b":{}}'], ['{"a":[1]}', "{}"]),
    (
        {"type": "object", "properties": {"c": {"$ref": "#"}}, "additionalProperties": False},
        ['{"c":{"c":{}}}'],
        ['{"c":1}'],
    ),
]
ARRAYS: list[Case] = [
    (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        ["[]", "[1]", '[1,"a"]'],
        ['["a"]', '[1,"a",2]'],
    ),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 2}, ['[1,"a"]'], ["[1]"]),
    ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, ["[1]"], ['["a"]', "[1,2]"]),
    ({"type": "array", "contains": {"const": 1}}, ["[1]", '["a",1]'], ["[]", '["a"]']),
    (
        {"type": "array", "contains": {"const": 1}, "minContains": 2, "items": {"type": "integer"}},
        ["[2,1,3,1]"],
        ["[1,2]"],
    ),
    ({"type": "array", "contains": {"const": 1}, "maxItems": 2}, ["[1]", "[2,1]"], ["[2,2]", "[1,2,3]", "[]"]),
    ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, ["[true,false]", "[]"], ["[true,true]"]),
    (
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 5},
            "uniqueItems": True,
            "minItems": 2,
            "maxItems": 3,
        },
        ["[1,2]", "[5 , 4, 3]"],
        ["[1]", "[1,1]", "[1,2,3,4]"],
    ),
    ({"type": "array", "items": {"enum": [1, 1.0, "1"]}, "uniqueItems": True}, ['[1,"1"]'], ["[1,1]"]),
]
COMBINED: list[Case] = [
    ({"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}]}, ['"a"', '"abc"'], ["1"]),
    ({"oneOf": [closed("a", a={}), closed("b", b={})]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', "{}"]),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}, ['{"a":1}'], ['{"a":1,"b":1}', "{}"]),
    ({"oneOf": [{"type": "integer", "maximum": 2}, {"type": "integer", "minimum": 2}]}, ["1", "3"], ["2"]),
    (
        {"allOf": [closed(a={}, b={}), {"required": ["b"]}, {"properties": {"b": {"type": "null"}}}]},
        ['{"b":null}'],
        ['{"b":1}'],
    ),
    ({"not": {"type": "string"}}, ["1", "null"], ['"a"']),
    ({"type": "integer", "not": {"const": 5}}, ["4", "55"], ["5"]),
    (
        closed("k", k={"enum": ["a", "b"]}, v={"type": "integer"})
        | {
            "if": {"properties": {"k": {"const": "a"}}, "required": ["k"]},
            "then": {"required": ["v"]},
            "else": {"properties": {"v": False}},
        },
        ['{"k":"b"}', '{"k":"a","v":1}'],
        ['{"k":"a"}', '{"k":"b","v":1}'],
    ),
    (
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/a"}}]}},
        },
        ["[[null]]", "[]"],
        ["1"],
    ),
    (
        {
            "$id": "Node",
            "type": "object",
            "properties": {"nodes": {"type": "array", "items": {"$ref": "Node"}}},
            "required": ["nodes"],
        },
        ['{"nodes":[{"nodes":[]}]}'],
        ['{"nodes":[1]}'],
    ),
    ({"$id": "https://a.bc/x", "$ref": "#/$defs/y%20z", "$defs": {"y z": {"const": 1}}}, ["1"], ["2"]),
    ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "const": 1}}}, ["1"], ["2"]),
    (
        {
            "$comment": "x",
            "title": "x",
            "examples": [1],
            "default": 1,
            "deprecated": True,
            "readOnly": True,
            "x-any": {},
            "contentMediaType": "a/b",
            "discriminator": {"propertyName": "k"},
            "type": "null",
        },
        ["null"],
        ["1"],
    ),
]


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [*NUMBERS, *STRINGS, *OBJECTS, *ARRAYS, *COMBINED],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_what_is_taken(wanted: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not takes(schema(wanted), text)] == []
    assert [text for text in bad if takes(schema(wanted), text)] == []


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (closed(v={"type": "array", "uniqueItems": True}), "#/properties/v: 'uniqueItems' .* items of an enum"),
        (closed(v={"type": "array", "contains": {}, "maxContains": 2}), "#/properties/v: 'maxContains'"),
        (closed(v={"type": "string", "format": "phone"}), "#/properties/v: 'format' 'phone'"),
        (closed(v={"type": "string", "pattern": "(a)\\1"}), "#/properties/v: 'pattern' .* back-reference"),
        (closed(v={"type": "integer", "nullable": True}), "#/properties/v: 'nullable' .*\"null\""),
        (closed(v={"maxLenght": 3}), "#/properties/v: 'maxLenght' is not enforced"),
        (closed(v={"type": "number", "multipleOf": 1e-300}), "#/properties/v: 'multipleOf'"),
        (closed(v={"minLength": -1}), "#/properties/v: 'minLength' must be a whole number"),
        (closed(v={"minimum": "1"}), "#/properties/v: 'minimum' must be a number"),
        (closed(v={"required": True}), "#/properties/v: 'required' must be a list"),
        (closed(v={"anyOf": []}), "#/properties/v: 'anyOf' must be a list"),
        (closed(v=3), "#/properties/v: '3' is no JSON schema"),
        (closed("v", v={"minimum": 3, "maximum": 2, "type": "integer"}), "#/properties/v: no output can fulfil it"),
        (
            closed("v", v={"minLength": 5, "pattern": "^a$", "type": "string"}),
            "#/properties/v: no output can fulfil it",
        ),
        ({"type": "object", "minProperties": 2}, "#: 'minProperties' 2 is enforced for names that are listed only"),
        (closed(a={}) | {"minProperties": 3}, "#: 'minProperties' 3 cannot be had"),
        ({"type": "object", "patternProperties": {"(": {}}}, "#: 'patternProperties' .* not closed"),
        ({"type": "object", "patternProperties": {f"^{x}": {} for x in "abcdef"}}, "#: 'patternProperties' of 6"),
        (
            {"anyOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"$dynamicRef": "#x"}}},
            "#/\\$defs/x: '\\$dynamicRef' .* \\$ref",
        ),
        ({"anyOf": [{}], "unevaluatedProperties": False}, "#: 'unevaluatedProperties' is not enforced beside 'anyOf'"),
        ({"if": {"uniqueItems": True}, "then": {}}, "#: 'if' cannot be enforced with 'uniqueItems'"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#: 'oneOf' .* under 0 and 1 of it at once: use anyOf"),
        ({"items": {"$ref": "#/$defs/é/x~1y"}}, "#/items: '\\$ref' .* put it under \\$defs"),
        ({"minimum": 1, "x": 1}, "#: 'x' is not enforced"),
    ],
)
def test_what_is_refused_is_named(wanted: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why) as error:
        compiled(schema(wanted))
    assert "coerce" not in str(error.value)
    assert "line" not in str(error.value).replace("outline", "")


@pytest.mark.parametrize("text", ['{"minimum": 1e999}', '{"minimum": 1e-999}', '{"minimum": Infinity}'])
def test_numbers_beyond_all_use_are_refused(text: str) -> None:
    with pytest.raises(Refused, match="not JSON"):
        grammar_of(parsed(text), Probe())
