"""JSON schemas drawn at random, of every keyword with its edges, and texts near an answer that may be valid or not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_BOUNDS = [0, 1, -1, 5, 7, 10, 99, 100, 0.5, -1.5, 0.1, 0.3, 5.5, 1e-7, 1e10, -12.75, 2**53, 2**53 + 1, -(2**53) - 1,
           2**63 - 1, -(2**63), 2**64 - 1, 10**40, 0.30000000000000004, -0.0]  # fmt: skip
_GAPS = [0, 0, 0.5, 1, 1, 2, 3, 0.1, 10, 1000]
_STEPS = [1, 2, 3, 5, 7, 10, 60, 100, 0.5, 0.25, 0.1, 0.01, 2.5, 1.5, 1000]
_NAMES = ["a", "b", "name", "a b", 'q"uote', "back\\slash", "new\nline", "é", "日本", "", "a/b", "~", "score", "x1"]
_PATTERNS = ["^[a-c]{1,4}$", "x", "^\\d+$", "^[^\\s]{2}$", "^\\S+$", "[^a]", "^a|b$", "^(ab|cd)*$", "^\\w+-\\w+$", "^$",
             "^[\\u0000-\\u001f\"\\\\]{1,2}$", "^.{2,3}$", "^(?!a)[a-z]{2}$", "^(?=.*\\d)[a-z\\d]{3}$",
             "^\\p{Lu}\\p{Ll}*$", "^[\\w.-]+@[\\w.-]+$", "^\\s[\\S]$",
             "^[^\"]*$", "^(?:a{2,3}|[^a-y]z){1,2}$"]  # fmt: skip
_NAME_PATTERNS = ["^a", "^[ab]$", "b$", "^score$", "^x\\d$", "^[^a]*$", "", "^[a-z]{1,3}$", "^(a|b|c)?$"]
_FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "json-pointer",
            "uri-reference", "idn-email", "regex", "relative-json-pointer", "iri"]  # fmt: skip
_SCALARS = [None, True, False, 0, 1, -1, 1.5, 2**53 + 1, -(2**63), 0.1, "a", "b", "ab", "", "true", "1", '"', "\n", "é"]


class Draw:
    """One source of chance.

    Args:
        seed: equal ones draw the same.
    """

    def __init__(self, seed: int | str) -> None:
        self.chance = random.Random(seed)

    def schema(self) -> Schema:
        """Any schema."""
        chance = self.chance
        definitions: Schema = {}
        if chance.random() < 0.15:
            definitions["t"] = self._schema(2)
        schema = self._schema(0)
        if definitions:
            schema = (
                {"$defs": definitions, "allOf": [schema]} if "$defs" in schema else {**schema, "$defs": definitions}
            )
            if chance.random() < 0.7:
                schema = self._one({"$ref": "#/$defs/t"}) | {"$defs": definitions}
        return schema

    def _one(self, schema: Schema) -> Schema:
        return {"type": "object", "properties": {"v": schema}, "required": ["v"], "additionalProperties": False}

    def _schema(self, depth: int) -> Schema:
        kinds: list[tuple[Callable[[int], Schema], int]] = [
            (self._number, 5), (self._string, 5), (self._values, 2), (self._plain, 1),
        ]  # fmt: skip
        if depth < 3:
            kinds += [(self._object, 5), (self._array, 3), (self._combined, 2)]
        draw = self.chance.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]
        return draw(depth)

    def _plain(self, depth: int) -> Schema:
        return self.chance.choice(
            [{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}, {"type": ["string", "boolean"]}]
        )

    def _number(self, depth: int) -> Schema:
        chance = self.chance
        schema: Schema = {"type": chance.choice(["integer", "number"])}
        low = chance.choice(_BOUNDS)
        if chance.random() < 0.7:
            schema[chance.choice(["minimum", "exclusiveMinimum"])] = low
        if chance.random() < 0.7:
            high = low + chance.choice(_GAPS) if chance.random() < 0.6 else chance.choice(_BOUNDS)
            schema[chance.choice(["maximum", "exclusiveMaximum"])] = high
        if chance.random() < 0.25:
            schema["multipleOf"] = chance.choice(_STEPS)
        return schema

    def _string(self, depth: int) -> Schema:
        chance = self.chance
        schema: Schema = {"type": "string"}
        if chance.random() < 0.5:
            schema["maxLength"] = chance.choice([0, 1, 2, 3, 8, 20])
        if chance.random() < 0.3:
            schema["minLength"] = chance.choice([0, 1, 2, 3])
        if chance.random() < 0.5:
            schema["pattern"] = chance.choice(_PATTERNS)
        elif chance.random() < 0.4:
            schema["format"] = chance.choice(_FORMATS)
        return schema

    def _values(self, depth: int) -> Schema:
        chance = self.chance
        values: list[Any] = chance.sample(_SCALARS, chance.randint(1, 5))
        if chance.random() < 0.2:
            values.append(chance.choice([{"a": [1, "x"]}, [], {}, [None], {"b": {"a": 2**60 + 1}}]))
        return {"const": values[0]} if chance.random() < 0.3 else {"enum": values}

    def _array(self, depth: int) -> Schema:
        chance = self.chance
        schema: Schema = {"type": "array", "maxItems": chance.choice([0, 1, 2, 3])}
        if chance.random() < 0.4:
            schema["minItems"] = chance.choice([0, 1, 2])
        if chance.random() < 0.3:
            schema["prefixItems"] = [self._schema(depth + 2) for _ in range(chance.randint(1, 2))]
        if chance.random() < 0.8:
            schema["items"] = self._schema(depth + 1)
        if chance.random() < 0.15:
            schema["contains"] = self._schema(depth + 2)
        if chance.random() < 0.15:
            schema["uniqueItems"] = True
            schema["items"] = self._values(depth)
        return schema

    def _object(self, depth: int) -> Schema:
        chance = self.chance
        names = chance.sample(_NAMES, chance.randint(0, 3))
        schema: Schema = {"type": "object", "properties": {name: self._schema(depth + 1) for name in names}}
        if names and chance.random() < 0.8:
            schema["required"] = chance.sample([*names, *chance.sample(_NAMES, 1)], 1)
        extra = chance.random()
        if extra < 0.6:
            schema["additionalProperties"] = False
        elif extra < 0.8:
            schema["additionalProperties"] = self._schema(depth + 2)
            schema["maxProperties"] = chance.randint(1, 4)
        else:
            schema["maxProperties"] = chance.randint(0, 4)
        if chance.random() < 0.25:
            patterns = chance.sample(_NAME_PATTERNS, chance.randint(1, 2))
            schema["patternProperties"] = {pattern: self._schema(depth + 2) for pattern in patterns}
            schema["maxProperties"] = chance.randint(1, 4)
        if chance.random() < 0.2:
            schema["minProperties"] = chance.randint(0, 3)
        if chance.random() < 0.15:
            schema["propertyNames"] = chance.choice(
                [{"type": "string"}, {"pattern": "^[a-z]*$"}, {"enum": ["a", "b", "é"]}, {"maxLength": 2}, True]
            )
        if len(names) > 1 and chance.random() < 0.15:
            schema["dependentRequired"] = {names[0]: [names[1]]}
        return schema

    def _combined(self, depth: int) -> Schema:
        chance = self.chance
        parts = [self._schema(depth + 1) for _ in range(2)]
        match chance.randrange(7):
            case 0:
                return {"anyOf": parts}
            case 1:
                return {"oneOf": parts}
            case 2:
                return {"allOf": [parts[0], self._narrower(parts[0])]}
            case 3:
                return {**parts[0], "not": self._values(depth) if chance.random() < 0.5 else self._number(depth)}
            case 4:
                return {"anyOf": [{**parts[0], "title": "x"}, {"type": "null"}], "default": None}
            case 5:
                kinds = chance.sample(["a", "b", "c"], 2)
                tagged = [self._one(part) for part in parts]
                for kind, part in zip(kinds, tagged, strict=True):
                    part["properties"]["kind"] = {"const": kind}
                    part["required"].append("kind")
                return {"oneOf": tagged}
        return {
            "type": "object",
            "properties": {"k": {"enum": ["x", "y"]}, "v": parts[0]},
            "required": ["k"],
            "additionalProperties": False,
            "if": {"properties": {"k": {"const": "x"}}, "required": ["k"]},
            "then": {"required": ["v"]},
            "else": {"properties": {"v": {"type": "null"}}},
        }

    def _narrower(self, schema: Schema) -> Schema:
        chance = self.chance
        match schema.get("type"):
            case "string":
                return {"maxLength": chance.randint(1, 5), "pattern": chance.choice(_PATTERNS)}
            case "integer" | "number":
                return {"minimum": chance.choice(_BOUNDS)}
            case "array":
                return {"maxItems": 2, "items": self._schema(3)}
            case "object":
                return {"properties": {chance.choice(_NAMES): self._schema(3)}, "maxProperties": 3}
        return {"title": "nothing more"}

    def near(self, value: Any) -> Any:
        """A value like another, with one change."""
        chance = self.chance
        match value:
            case dict() if value and chance.random() < 0.7:
                key = chance.choice(list(value))
                return {**value, key: self.near(value[key])}
            case dict():
                change = chance.randrange(3)
                if change == 0 and value:
                    gone = chance.choice(list(value))
                    return {key: each for key, each in value.items() if key != gone}
                return {**value, chance.choice(_NAMES): chance.choice(_SCALARS)}
            case list() if value and chance.random() < 0.6:
                place = chance.randrange(len(value))
                return [*value[:place], self.near(value[place]), *value[place + 1 :]]
            case list():
                return [*value, chance.choice(value)] if value and chance.random() < 0.5 else [*value, 1][1:]
            case bool() | None:
                return chance.choice(_SCALARS)
            case int() | float():
                return value + chance.choice([1, -1, 0.5, 0.1, -0.25, 1e-9, 2, 100])
            case str():
                place = chance.randint(0, len(value))
                return value[:place] + chance.choice(["a", "\n", " ", "1", '"', "\u00a0", ""]) + value[place + 1 :]
        return value


def spelled(value: Any, chance: random.Random) -> str:
    """A value as JSON; sometimes with letters as escapes, which are the same text."""
    text = json.dumps(value, ensure_ascii=chance.random() < 0.3)
    if chance.random() < 0.2:
        text = text.replace('"a', '"\\u0061')
    return text
