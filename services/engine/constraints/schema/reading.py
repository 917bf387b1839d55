"""Schema reader: a schema as alternatives of shapes, from its own keywords and the schemas that it applies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from services.common.json_schema import formats
from services.common.json_schema.numbers import Numbers
from services.engine.constraints.refusal import Refused
from services.engine.constraints.schema import keywords
from services.engine.constraints.schema.document import Document, Node
from services.engine.constraints.schema.negation import EXCLUDED, FORBIDDEN_PATTERN, negated
from services.engine.constraints.schema.shapes import (
    NOTHING,
    Arrays,
    Contains,
    Demands,
    Layer,
    Objects,
    Pattern,
    Shape,
    Strings,
    exact,
)

_MOST_ALTERNATIVES = 512
_MOST_READ = 30_000
_NO_SCHEMA = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas", "dependencies"})
"""Keywords that apply schemas to the same value; an ``unevaluated…`` beside them would depend on those."""


class Reader:
    """Reads the schemas of one document.

    Args:
        overlap: tells whether some value may have both shapes; True if that is not known.
    """

    def __init__(self, document: Document, overlap: Callable[[Shape, Shape], bool]) -> None:
        self.document = document
        self._overlap = overlap
        self._read = 0
        self._within: set[Node] = set()
        self._known: dict[Node, list[Shape]] = {}

    def alternatives(self, demands: Demands) -> list[Shape]:
        """Shapes of the values that fulfil all demands.

        Raises:
            Refused: a demand cannot be enforced.
        """
        found = [Shape()]
        for node in demands:
            found = self._both(found, self._of(node), node)
        return found

    def _both(self, left: list[Shape], right: list[Shape], node: Node) -> list[Shape]:
        if len(left) * len(right) > _MOST_ALTERNATIVES * 8:
            raise self._too_many(node)
        found = [both for a in left for b in right if not (both := a & b).nothing]
        if len(found) > _MOST_ALTERNATIVES:
            raise self._too_many(node)
        return found

    def _too_many(self, node: Node) -> Refused:
        return Refused(f"{node.path}: it has more than {_MOST_ALTERNATIVES} alternatives: simplify it")

    def _of(self, node: Node) -> list[Shape]:
        if node in self._known:
            return self._known[node]
        if node in self._within:
            raise node.refuse("$ref", "leads back to itself without anything between")
        self._read += 1
        if self._read > _MOST_READ:
            raise Refused(f"{node.path}: the schema is too complex: it is more than {_MOST_READ} schemas at once")
        self._within.add(node)
        try:
            found = self._known[node] = self._fresh(node)
        finally:
            self._within.discard(node)
        return found

    def _fresh(self, node: Node) -> list[Shape]:
        if isinstance(node.schema, bool):
            return [Shape()] if node.schema else []
        schema = keywords.check(node)
        own = self._own(node)
        found = [] if own.nothing else [own]
        for part in self._applied(node, schema):
            found = self._both(found, part, node)
        return found

    def _applied(self, node: Node, schema: dict[Any, Any]) -> Iterator[list[Shape]]:
        """Shapes that each keyword allows which applies schemas to the same value."""
        document = self.document
        if "const" in schema:
            yield self._values(node, "const", [schema["const"]])
        if "enum" in schema:
            if not isinstance(schema["enum"], list):
                raise node.refuse("enum", "must be a list")
            yield self._values(node, "enum", schema["enum"])
        if "$ref" in schema:
            yield self._of(document.target(node))
        if "allOf" in schema:
            for place in range(len(keywords.members(node, "allOf"))):
                yield self._of(document.part(node, "allOf", place))
        if "anyOf" in schema:
            yield self._any(
                node, [document.part(node, "anyOf", i) for i in range(len(keywords.members(node, "anyOf")))]
            )
        if "oneOf" in schema:
            yield self._one(
                node, [document.part(node, "oneOf", i) for i in range(len(keywords.members(node, "oneOf")))]
            )
        if "not" in schema:
            yield self._of(negated(document, node, document.part(node, "not"), "not"))
        if "if" in schema and schema.keys() & {"then", "else"}:
            condition = document.part(node, "if")
            fulfilled = self._of(condition)
            if "then" in schema:
                fulfilled = self._both(fulfilled, self._of(document.part(node, "then")), node)
            otherwise = self._of(negated(document, node, condition, "if"))
            if "else" in schema:
                otherwise = self._both(otherwise, self._of(document.part(node, "else")), node)
            yield self._any_of(node, [fulfilled, otherwise])
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needed in keywords.mapping(node, keyword).items():
                yield self._dependent(node, keyword, name, needed)

    def _any(self, node: Node, members: list[Node]) -> list[Shape]:
        return self._any_of(node, [self._of(member) for member in members])

    def _any_of(self, node: Node, parts: list[list[Shape]]) -> list[Shape]:
        found = [shape for part in parts for shape in part]
        if len(found) > _MOST_ALTERNATIVES:
            raise self._too_many(node)
        return found

    def _one(self, node: Node, members: list[Node]) -> list[Shape]:
        parts = [self._of(member) for member in members]
        for place, part in enumerate(parts):
            for other in range(place):
                if any(self._overlap(a, b) for a in part for b in parts[other]):
                    return self._only_one(node, members, f"{other} and {place}")
        return self._any_of(node, parts)

    def _only_one(self, node: Node, members: list[Node], overlapping: str) -> list[Shape]:
        """Shapes of each member without the values that are valid under another one."""
        found: list[Shape] = []
        # A negation may lose valid values, possibly all of them.
        with contextlib.suppress(Refused):
            for member in members:
                alone = self._of(member)
                for other in members:
                    if other is not member:
                        alone = self._both(alone, self._of(negated(self.document, other, other, "oneOf")), node)
                found = self._any_of(node, [found, alone])
            if found:
                return found
        raise node.refuse(
            "oneOf",
            f"cannot be enforced: a value may be valid under {overlapping} of it at once: use anyOf, or make them "
            "exclude each other",
        )

    def _dependent(self, node: Node, keyword: str, name: str, needed: Any) -> list[Shape]:
        """Shapes without a member, or with it and everything that depends on it."""
        absent = self.document.derived(node, f"{keyword} without {name}", lambda: {"properties": {name: False}})
        if keyword == "dependentRequired" or isinstance(needed, list):
            names = [name, *keywords.texts(node, keyword, needed)]
            present = self.document.derived(
                node, f"{keyword} with {name}", lambda: {"type": "object", "required": names}
            )
            return self._any(node, [absent, present])
        there = self.document.derived(node, f"{keyword} at {name}", lambda: {"type": "object", "required": [name]})
        schema = self._of(self.document.part(node, keyword, name))
        return self._any_of(node, [self._of(absent), self._both(self._of(there), schema, node)])

    def _values(self, node: Node, keyword: str, values: list[Any]) -> list[Shape]:
        strings: list[str] = []
        numbers = set()
        null, booleans = False, set()
        found: list[Shape] = []
        for place, value in enumerate(values):
            match value:
                case None:
                    null = True
                case bool():
                    booleans.add(value)
                case str():
                    strings.append(value)
                case list() | dict():
                    found += self._of(self.document.derived(node, f"{keyword} {place}", partial(_constant, value)))
                case _:
                    numbers.add(exact(value))
        scalars = Shape(
            null,
            frozenset(booleans),
            Numbers(values=frozenset(numbers)) if numbers else None,
            Strings(values=tuple(dict.fromkeys(strings))) if strings else None,
            None,
            None,
        )
        return found if scalars.nothing else [scalars, *found]

    def _own(self, node: Node) -> Shape:
        """Shape of the keywords that apply no schema to the same value."""
        named = keywords.types(node)
        all_types = frozenset(keywords.TYPES)
        shape = Shape(
            numbers=self._numbers(node), strings=self._strings(node, named), arrays=self._arrays(node),
            objects=self._objects(node),
        )  # fmt: skip
        if named is not None and not named:
            return NOTHING
        shape = shape.only(named or all_types)
        bounds = formats.bounds_of(str(node.schema.get("format")))
        if bounds is not None and shape.numbers is not None and named is not None and "number" not in named:
            low, high = bounds
            shape = replace(shape, numbers=shape.numbers & Numbers(low=exact(low), high=exact(high)))
        return shape

    def _numbers(self, node: Node) -> Numbers:
        found = Numbers()
        for inclusive, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            older = node.schema.get(exclusive)
            if isinstance(older, bool):  # draft 4
                bounds = [(keywords.number(node, inclusive), older)]
            else:
                bounds = [(keywords.number(node, inclusive), False), (keywords.number(node, exclusive), True)]
            for bound, is_open in bounds:
                if inclusive == "minimum":
                    found &= Numbers(low=bound, low_open=is_open and bound is not None)
                else:
                    found &= Numbers(high=bound, high_open=is_open and bound is not None)
        step = keywords.number(node, "multipleOf")
        if step is not None and step <= 0:
            raise node.refuse("multipleOf", "must be more than 0")
        return found & Numbers(step=step)

    def _strings(self, node: Node, named: frozenset[str] | None) -> Strings:
        patterns = []
        pattern = keywords.text(node, "pattern")
        if pattern is not None:
            patterns.append(Pattern(pattern, node))
        if FORBIDDEN_PATTERN in node.schema:
            patterns.append(Pattern(node.schema[FORBIDDEN_PATTERN], node, "not", negated=True))
        shape = keywords.text(node, "format")
        if shape is not None and (named is None or "string" in named):
            found = formats.pattern_of(shape)
            if found is not None:
                patterns.append(Pattern(found, node, "format"))
            elif not formats.says_nothing(shape, node.schema):
                raise node.refuse(
                    "format", f"{shape[:80]!r} is not known and would say nothing: describe it by a pattern"
                )
        return Strings(
            keywords.count(node, "minLength") or 0,
            keywords.count(node, "maxLength"),
            tuple(patterns),
            tuple(node.schema.get(EXCLUDED, ())),
        )

    def _arrays(self, node: Node) -> Arrays:
        schema, part = node.schema, self.document.part
        prefix: tuple[Demands, ...] = ()
        rest: Demands = ()
        listed = (
            "prefixItems" if "prefixItems" in schema else "items" if isinstance(schema.get("items"), list) else None
        )
        if listed is not None:
            prefix = tuple((part(node, listed, place),) for place in range(len(keywords.members(node, listed))))
        if "items" in schema and listed != "items":
            rest = (part(node, "items"),)
        elif listed == "items" and "additionalItems" in schema:
            rest = (part(node, "additionalItems"),)
        elif "unevaluatedItems" in schema:
            self._alone(node, "unevaluatedItems", _NO_SCHEMA | {"contains"})
            rest = (part(node, "unevaluatedItems"),)
        contains: tuple[Contains, ...] = ()
        if "contains" in schema:
            if "maxContains" in schema:
                raise node.refuse("maxContains", "is not enforced: leave it out, or describe the items by prefixItems")
            least = keywords.count(node, "minContains")
            contains = (Contains((part(node, "contains"),), 1 if least is None else least, node),)
        unique = schema.get("uniqueItems", False)
        if not isinstance(unique, bool):
            raise node.refuse("uniqueItems", "must be true or false")
        return Arrays(
            prefix,
            rest,
            keywords.count(node, "minItems") or 0,
            keywords.count(node, "maxItems"),
            tuple(each for each in contains if each.least),
            (node,) if unique else (),
        )

    def _objects(self, node: Node) -> Objects:
        schema, part = node.schema, self.document.part
        named = {key: part(node, "properties", key) for key in keywords.mapping(node, "properties")}
        patterns = tuple(
            (Pattern(key, node, "patternProperties"), part(node, "patternProperties", key))
            for key in keywords.mapping(node, "patternProperties")
        )
        extra = None
        if "additionalProperties" in schema:
            extra = part(node, "additionalProperties")
        elif "unevaluatedProperties" in schema:
            self._alone(node, "unevaluatedProperties", _NO_SCHEMA)
            extra = part(node, "unevaluatedProperties")
        counts = keywords.count(node, "minProperties"), keywords.count(node, "maxProperties")
        if not named and not patterns and extra is None and "propertyNames" not in schema and "required" not in schema:
            layers: tuple[Layer, ...] = ()
        else:
            layers = (Layer(node, named, patterns, extra),)
        return Objects(
            layers,
            tuple(keywords.texts(node, "required", schema.get("required", []))),
            (part(node, "propertyNames"),) if "propertyNames" in schema else (),
            counts[0] or 0,
            counts[1],
            () if counts == (None, None) else (node,),
        )

    def _alone(self, node: Node, keyword: str, others: frozenset[str]) -> None:
        beside = sorted(others & node.schema.keys())
        if beside and node.schema[keyword] not in (True, {}):
            raise node.refuse(keyword, f"is not enforced beside '{beside[0]}': say it in each schema, or leave it out")


def _constant(value: Any) -> dict[str, Any]:
    """Schema of exactly one list or object."""
    if isinstance(value, list):
        if not value:
            return {"type": "array", "maxItems": 0}
        items = [{"const": each} for each in value]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    members = {key: {"const": each} for key, each in value.items()}
    return {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}
