"""Types of a function's parameters, from its schema.

Nobody has checked that it is a JSON schema: what is not one says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SCALARS = frozenset({"integer", "number", "boolean", "null"})
CONTAINERS = frozenset({"object", "array"})
_KINDS = SCALARS | CONTAINERS | {"string"}
_DEEPEST = 32
_DEFINITION = re.compile(r"#/(\$defs|definitions)/([^/]+)")

Types = frozenset[str]
NO_TYPES: Types = frozenset()


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter of a function, as far as it is known.

    Args:
        types: JSON types that it may have; none: nobody knows, and its text is a string.
        schema: its JSON schema.
        root: the document in which references are looked up.
    """

    types: Types = NO_TYPES
    schema: Any = None
    root: Any = None


@dataclass(frozen=True, slots=True)
class Signature:
    """Signature of a function: its parameters, by its schema.

    Args:
        named: those that it names.
        others: all others.
        schema: of the arguments as a whole.
    """

    named: Mapping[str, Parameter] = field(default_factory=dict)
    others: Parameter = Parameter()
    schema: Any = None

    def of(self, key: str) -> Parameter:
        """One parameter."""
        return self.named.get(key, self.others)


UNKNOWN = Signature()


def signatures(tools: Sequence[Mapping[str, Any]]) -> dict[str, Signature]:
    """Signatures of the tools' functions, by name."""
    found: dict[str, Signature] = {}
    for tool in tools:
        function = tool.get("function", {})
        root = function.get("parameters")
        schema = resolve(root, root)
        if not isinstance(schema, Mapping):
            continue
        properties = schema.get("properties")
        named = properties if isinstance(properties, Mapping) else {}
        others = schema.get("additionalProperties")
        found[function.get("name", "")] = Signature(
            {key: Parameter(types_of(value, root), value, root) for key, value in named.items()},
            Parameter(types_of(others, root), others, root),
            root,
        )
    return found


def kind_of(value: Any) -> str:
    """The JSON type of a value; "integer" for whole numbers."""
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def resolve(schema: Any, root: Any) -> Any:
    """Follows references within a document; None when one leads nowhere or in a circle."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
            return schema
        schema = _target(reference, root)
    return None


def _target(reference: str, root: Any) -> Any:
    if not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isascii() and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def definitions_for(schema: Any, root: Any) -> dict[str, dict[str, Any]] | None:
    """The definitions of ``root`` that a schema refers to, directly or through others, as they stand in ``root``; None
    when a reference leads elsewhere."""
    found: dict[str, dict[str, Any]] = {}
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        if not isinstance(value, Mapping):
            continue
        waiting += value.values()
        reference = value.get("$ref")
        if not isinstance(reference, str):
            continue
        match = _DEFINITION.match(reference)
        place = root.get(match[1]) if match is not None and isinstance(root, Mapping) else None
        name = match[2].replace("~1", "/").replace("~0", "~") if match is not None else ""
        if not isinstance(place, Mapping) or name not in place or match is None:
            return None
        if name not in found.setdefault(match[1], {}):
            found[match[1]][name] = place[name]
            waiting.append(place[name])
    return found


def types_of(schema: Any, root: Any) -> Types:
    """JSON types that a schema allows, as far as it says so; references are looked up in ``root``."""
    return _types(schema, root, {}, 0)


def _types(schema: Any, root: Any, seen: dict[str, Types], depth: int) -> Types:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return NO_TYPES
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in seen:
            seen[reference] = NO_TYPES  # a circle says nothing
            seen[reference] = _types(_target(reference, root), root, seen, depth + 1)
        return seen[reference]
    named = frozenset(kind for kind in _members(schema.get("type")) if isinstance(kind, str) and kind in _KINDS)
    for union in ("anyOf", "oneOf"):
        for member in _members(schema.get(union)):
            named |= _types(member, root, seen, depth + 1)
    if named:
        return named
    for member in _members(schema.get("allOf")):
        found = _types(member, root, seen, depth + 1)
        named = found if not named else (named & found or named)
    if named:
        return named
    if isinstance(schema.get("enum"), list):
        return frozenset(map(kind_of, schema["enum"]))
    if "const" in schema:
        return frozenset((kind_of(schema["const"]),))
    if isinstance(schema.get("properties"), Mapping):
        return frozenset(("object",))
    return frozenset(("array",)) if isinstance(schema.get("items"), Mapping) else NO_TYPES


def _members(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
