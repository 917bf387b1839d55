"""Negation of a schema, as a schema, as far as that is possible."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from services.engine.constraints.schema import keywords
from services.engine.constraints.schema.document import Document, Node
from services.engine.constraints.schema.shapes import exact


class _Keyword:
    """Internal keyword that no client can send."""

    def __init__(self, name: str) -> None:
        self.name = name


EXCLUDED = _Keyword("excluded")
"""Keyword of the texts that a string must not be."""
FORBIDDEN_PATTERN = _Keyword("forbidden pattern")
"""Keyword of a pattern that a string must not contain."""
_OPPOSITES = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_Any = dict[Any, Any]


def negated(document: Document, at: Node, node: Node, keyword: str) -> Node:
    """Schema of values that are not valid under ``node``.

    Args:
        at: schema whose keyword needs it.
        keyword: keyword, which a refusal names.

    Raises:
        Refused: there is no such schema.
    """
    return document.derived(at, f"{keyword} negated", lambda: _Negation(document, at, keyword).of(node))


class _Negation:
    def __init__(self, document: Document, at: Node, keyword: str) -> None:
        self._document = document
        self._at = at
        self._keyword = keyword
        self._depth = 0

    def of(self, node: Node) -> Any:
        if isinstance(node.schema, bool):
            return not node.schema
        self._depth += 1
        if self._depth > 64:
            raise self._at.refuse(self._keyword, "cannot be enforced: it is too large")
        schema = keywords.check(node)
        options = [self.of(self._document.target(node))] if "$ref" in schema else []
        options += [option for keyword in schema for option in self._each(node, schema, keyword)]
        return {"anyOf": options} if options else False

    def _each(self, node: Node, schema: _Any, keyword: str) -> list[Any]:
        """Schemas of the ways to violate one keyword."""
        part = self._document.part
        value = schema[keyword]
        match keyword:
            case "type":
                return self._other_types(keywords.types(node) or frozenset())
            case "const":
                return self._other_values([value])
            case "enum":
                return self._other_values(value if isinstance(value, list) else [])
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" if not isinstance(value, bool):
                return [{"type": "number", _OPPOSITES[keyword]: value}]
            case "minLength":
                least = keywords.count(node, keyword) or 0
                return [{"type": "string", "maxLength": least - 1}] if least else []
            case "maxLength":
                return [{"type": "string", "minLength": (keywords.count(node, keyword) or 0) + 1}]
            case "minItems":
                least = keywords.count(node, keyword) or 0
                return [{"type": "array", "maxItems": least - 1}] if least else []
            case "maxItems":
                return [{"type": "array", "minItems": (keywords.count(node, keyword) or 0) + 1}]
            case "pattern":
                return [{"type": "string", FORBIDDEN_PATTERN: keywords.text(node, keyword)}]
            case "required":
                names = keywords.texts(node, keyword, value)
                return [{"type": "object", "properties": {name: False}} for name in names]
            case "properties":
                return [
                    {"type": "object", "required": [name], "properties": {name: self.of(part(node, keyword, name))}}
                    for name in keywords.mapping(node, keyword)
                ]
            case "anyOf":
                return [
                    {"allOf": [self.of(part(node, keyword, i)) for i in range(len(keywords.members(node, keyword)))]}
                ]
            case "allOf":
                return [self.of(part(node, keyword, i)) for i in range(len(keywords.members(node, keyword)))]
            case "not":
                return [part(node, keyword).schema]
            case "$ref":
                return []
        if keywords.says_nothing(keyword):
            return []
        raise self._at.refuse(
            self._keyword, f"cannot be enforced with '{keyword}' in it: say what is valid instead, or leave it out"
        )

    def _other_types(self, types: frozenset[str]) -> list[Any]:
        # Numbers that are not integers cannot be expressed: some valid values are lost, as elsewhere.
        named = types | ({"integer", "number"} if types & {"integer", "number"} else set())
        others = [kind for kind in keywords.TYPES if kind not in named and kind != "integer"]
        return [{"type": others}] if others else []

    def _other_values(self, values: list[Any]) -> list[Any]:
        if any(isinstance(value, dict | list) for value in values):
            raise self._at.refuse(
                self._keyword, "cannot be enforced with lists or objects as values in it: say what is valid instead"
            )
        texts = [value for value in values if isinstance(value, str)]
        numbers = sorted((v for v in values if not isinstance(v, str | bool) and v is not None), key=exact)
        booleans = [value for value in (True, False) if value not in [v for v in values if isinstance(v, bool)]]
        found: list[Any] = [{"type": ["array", "object"] + ([] if None in values else ["null"])}]
        if booleans:
            found.append({"enum": booleans})
        found.append({"type": "string", EXCLUDED: texts})
        edges = [None, *numbers, None]
        for low, high in pairwise(edges):
            piece: _Any = {"type": "number"}
            if low is not None:
                piece["exclusiveMinimum"] = low
            if high is not None:
                piece["exclusiveMaximum"] = high
            found.append(piece)
        return found
