"""Keywords of JSON schemas: those that are read, annotations, and those that are refused."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

from services.engine.constraints.refusal import Refused
from services.engine.constraints.schema.document import Node
from services.engine.constraints.schema.shapes import exact

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_READ_NAMES = """
    type enum const properties required additionalProperties patternProperties propertyNames minProperties
    maxProperties dependentRequired dependentSchemas dependencies prefixItems items additionalItems contains minContains
    maxContains minItems maxItems uniqueItems minLength maxLength pattern format minimum maximum exclusiveMinimum
    exclusiveMaximum multipleOf allOf anyOf oneOf not if then else $ref unevaluatedProperties
    unevaluatedItems
"""
_ANNOTATION_NAMES = """
    $schema $id id $anchor $dynamicAnchor $recursiveAnchor $comment $defs definitions $vocabulary title description
    default examples example deprecated readOnly writeOnly contentEncoding contentMediaType contentSchema discriminator
    xml externalDocs x-guidance
"""
_READ = frozenset(_READ_NAMES.split())
_SAY_NOTHING = frozenset(_ANNOTATION_NAMES.split())
"""Annotations, also of OpenAPI and of generators, and the keywords of definitions."""
_REFUSED = {
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "nullable": 'say "type": ["…", "null"]',
    "divisibleBy": "use multipleOf",
    "disallow": "use not",
    "extends": "use allOf",
}


def check(node: Node) -> dict[str, Any]:
    """Checks the keywords of a schema and returns it.

    Raises:
        Refused: it is not a schema, or has a keyword that would not be enforced.
    """
    schema = node.schema
    if not isinstance(schema, dict):
        raise Refused(f"{node.path}: {str(schema)[:80]!r} is no JSON schema: it must be an object, true or false")
    for keyword in schema:
        if keyword in _READ or says_nothing(keyword) or not isinstance(keyword, str):
            continue
        instead = _REFUSED.get(keyword, "leave it out, or name it x-… if it is an annotation")
        raise node.refuse(keyword[:80], f"is not enforced: {instead}")
    return schema


def says_nothing(keyword: Any) -> bool:
    """True if a keyword is an annotation."""
    return keyword in _SAY_NOTHING or (isinstance(keyword, str) and keyword.startswith("x-"))


def types(node: Node) -> frozenset[str] | None:
    """Types that a schema names; None: it names none."""
    named = node.schema.get("type")
    if named is None and "type" not in node.schema:
        return None
    found = named if isinstance(named, list) else [named]
    for each in found:
        if each not in TYPES:
            raise node.refuse("type", f"{str(each)[:80]!r} is no type: use {', '.join(TYPES)}")
    return frozenset(found)


def count(node: Node, keyword: str) -> int | None:
    """Value of a keyword that is a count; None: it is absent."""
    value = node.schema.get(keyword)
    if keyword not in node.schema:
        return None
    whole = isinstance(value, int | Decimal) and not isinstance(value, bool) and value == int(value)
    if not whole or int(value) < 0:
        raise node.refuse(keyword, "must be a whole number, 0 or more")
    return int(value)


def number(node: Node, keyword: str) -> Fraction | None:
    """Value of a keyword that is a number; None: it is absent."""
    value = node.schema.get(keyword)
    if keyword not in node.schema:
        return None
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise node.refuse(keyword, "must be a number")
    return exact(value)


def text(node: Node, keyword: str) -> str | None:
    """Value of a keyword that is a string; None: it is absent."""
    value = node.schema.get(keyword)
    if keyword not in node.schema:
        return None
    if not isinstance(value, str):
        raise node.refuse(keyword, "must be a string")
    return value


def texts(node: Node, keyword: str, value: Any) -> list[str]:
    """Value of a keyword that is a list of strings."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise node.refuse(keyword, "must be a list of strings")
    return value


def mapping(node: Node, keyword: str) -> dict[str, Any]:
    """Value of a keyword that is an object; {}: it is absent."""
    value = node.schema.get(keyword, {})
    if not isinstance(value, dict):
        raise node.refuse(keyword, "must be an object")
    return value


def members(node: Node, keyword: str) -> list[Any]:
    """Value of a keyword that is a list of schemas."""
    value = node.schema[keyword]
    if not isinstance(value, list) or not value:
        raise node.refuse(keyword, "must be a list of schemas, at least one")
    return value
