"""JSON schemas to try structured output with: drawn from a seed, nested, and bounded so that any output ends.

Bounded by construction: a model that draws tokens at random must reach the end of every document, so strings have a
`maxLength`, an anchored pattern or a format, arrays and maps a largest size, and references go round only where each
turn may end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ("id", "name", "age", "tags", "kind", "size", "é-key", 'quo"te', "a b", "nested", "value", "x", "y", "z", "$t")
_WORDS = (
    "red",
    "green",
    "blue",
    "north",
    "größe",
    "日本",
    'with "quotes"',
    "back\\slash",
    "</think>",
    "<|im_end|>",
    "",
)
_PATTERNS = (
    "^[A-Z]{2,4}-[0-9]{1,3}$",
    "^(foo|bar|baz)$",
    "^[a-f0-9]{8}$",
    "^\\d{4}/\\d{2}$",
    '^[^"\\\\x]{0,6}$',
    "^(?:a|b(?:c|d){1,3})$",
    "^\\w{1,5}$",
    "^[\\u00e0-\\u00ff ]{1,4}$",
)
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "duration")
_UNENFORCED: tuple[Schema, ...] = (
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3, "uniqueItems": True},
    {"not": {"type": "string"}},
    {"type": "object", "properties": {"a": {"type": "null"}}, "unevaluatedProperties": False},
    {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"type": "null"}, "maxProperties": 2},
    {"type": "integer", "minimum": 5, "maximum": 4},
    {"if": {"type": "integer"}, "then": {"minimum": 3}},
    {"type": "string", "pattern": "^(?=a)[a-z]{1,3}$"},
    {"type": "string", "format": "no-such-format"},
    {"type": "array", "contains": {"type": "integer"}, "maxItems": 2},
    {"type": "object", "properties": {"a": {"type": "null"}}, "dependentRequired": {"a": ["b"]}},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "integer", "minimum": 5, "maximum": 20}]},
    {"type": "object", "minProperties": 2, "maxProperties": 3, "additionalProperties": {"type": "null"}},
)


class SchemaMaker:
    """Draws schemas.

    Args:
        unenforced: share of the schemas that get a keyword somewhere that an engine may have to refuse.
    """

    def __init__(self, seed: int, *, unenforced: float = 0.05) -> None:
        self._random = random.Random(seed)
        self._unenforced = unenforced
        self._definitions: Schema = {}

    def schema(self) -> Schema:
        """A document's schema."""
        draw = self._random
        self._definitions = {}
        root = self._node(draw.randint(1, 3))
        if draw.random() < 0.8 and root.get("type") != "object":
            root = self._object(2)
        if draw.random() < self._unenforced:
            root = {
                "type": "object",
                "properties": {"root": root, "odd": draw.choice(_UNENFORCED)},
                "required": ["root", "odd"],
                "additionalProperties": False,
            }
        if self._definitions:
            root = {**root, "$defs": self._definitions}
        if draw.random() < 0.2:
            root = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "description": "d", **root}
        return root

    def _node(self, depth: int) -> Schema:
        leaves: list[Callable[[], Schema]] = [
            self._string, self._string, self._number, self._number, self._choice, self._plain
        ]  # fmt: skip
        inner: list[Callable[[], Schema]] = [
            lambda: self._object(depth), lambda: self._object(depth), lambda: self._array(depth),
            lambda: self._union(depth), lambda: self._reference(depth), lambda: self._map(depth),
            lambda: self._both(depth),
        ]  # fmt: skip
        return self._random.choice(leaves if depth <= 0 else leaves + 2 * inner)()

    def _plain(self) -> Schema:
        return {"type": self._random.choice(["boolean", "null"])}

    def _string(self) -> Schema:
        draw = self._random
        kind = draw.randrange(3)
        if kind == 0:
            return {"type": "string", "pattern": draw.choice(_PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": draw.choice(_FORMATS)}
        least = draw.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + draw.randrange(12)}

    def _number(self) -> Schema:
        draw = self._random
        low = draw.randrange(-1000, 1000)
        high = low + draw.randrange(1, 2000)
        if draw.random() < 0.6:
            bounds = {"minimum": low, "maximum": high} if draw.random() < 0.7 else {
                "exclusiveMinimum": low, "exclusiveMaximum": high + 1
            }  # fmt: skip
            return {"type": "integer", **bounds}
        return {"type": "number", "minimum": low, "maximum": high, "multipleOf": draw.choice([0.5, 0.25, 0.1, 2])}

    def _choice(self) -> Schema:
        draw = self._random
        values: list[Any] = [*draw.sample(_WORDS, 3), draw.randrange(100), None, True, -1.5, ["a", 1], {"k": "v"}]
        if draw.random() < 0.4:
            return {"const": draw.choice(values)}
        return {"enum": draw.sample(values, draw.randint(1, 5))}

    def _object(self, depth: int) -> Schema:
        draw = self._random
        names = draw.sample(_NAMES, draw.randint(1, 4))
        schema: Schema = {"type": "object", "properties": {name: self._node(depth - 1) for name in names}}
        required = [name for name in names if draw.random() < 0.7]
        if required or draw.random() < 0.5:
            schema["required"] = required
        schema["additionalProperties"] = False
        return schema

    def _array(self, depth: int) -> Schema:
        draw = self._random
        least = draw.randrange(3)
        schema: Schema = {
            "type": "array", "items": self._node(depth - 1), "minItems": least, "maxItems": least + draw.randrange(3)
        }  # fmt: skip
        if draw.random() < 0.3:
            schema["prefixItems"] = [self._node(0) for _ in range(draw.randint(1, 2))]
        return schema

    def _union(self, depth: int) -> Schema:
        draw = self._random
        if draw.random() < 0.4:
            # A tag makes the branches exclude each other, which oneOf needs.
            tags = draw.sample(["cat", "dog", "fish", "bird"], draw.randint(2, 3))
            branches: list[Schema] = [
                {
                    "type": "object",
                    "properties": {"kind": {"const": tag}, "value": self._node(depth - 1)},
                    "required": ["kind", "value"],
                    "additionalProperties": False,
                }
                for tag in tags
            ]
            return {"oneOf": branches}
        if draw.random() < 0.3:
            return {"type": ["integer", "null"], "minimum": 0, "maximum": 50}
        return {"anyOf": [self._node(depth - 1) for _ in range(draw.randint(2, 3))]}

    def _reference(self, depth: int) -> Schema:
        draw = self._random
        name = f"d{len(self._definitions)}"
        self._definitions[name] = {}
        if draw.random() < 0.4:
            # A list of any length: each turn may be the last.
            self._definitions[name] = {
                "type": "object",
                "properties": {
                    "item": self._node(0),
                    "next": {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]},
                },
                "required": ["item", "next"],
                "additionalProperties": False,
            }
        else:
            self._definitions[name] = self._node(depth - 1)
        return {"$ref": f"#/$defs/{name}"}

    def _map(self, depth: int) -> Schema:
        return {
            "type": "object",
            "patternProperties": {"^[a-e]{1,3}$": self._node(depth - 1)},
            "additionalProperties": False,
            "maxProperties": self._random.randint(1, 3),
        }

    def _both(self, depth: int) -> Schema:
        """Schema of what two schemas ask for at once; each lets the other's names pass."""
        first, second = self._object(depth - 1), self._object(depth - 1)
        second["properties"] = {
            key: value for key, value in second["properties"].items() if key not in first["properties"]
        }
        second["required"] = [name for name in second.get("required", ()) if name in second["properties"]]
        names = dict.fromkeys([*first["properties"], *second["properties"]], True)
        for part in (first, second):
            part["properties"] = {**names, **part["properties"]}
        return {"allOf": [first, second]}
