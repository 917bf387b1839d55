"""Shapes: demands on a value of each JSON type. A schema is a list of alternative shapes; the intersection of two
shapes is a shape."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import zip_longest

from services.common.json_schema.numbers import Numbers
from services.engine.constraints.schema.document import Node

Demands = tuple[Node, ...]
"""Demands: schemas that a value must all fulfil, each once; (): any value does."""


def joined(*demands: Demands) -> Demands:
    """Union of several demands."""
    return tuple(dict.fromkeys(node for each in demands for node in each))


@dataclass(frozen=True, slots=True)
class Pattern:
    """Regular expression to be found in a text, and its place in the schema."""

    text: str
    at: Node = field(compare=False)
    keyword: str = field(compare=False, default="pattern")
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Strings:
    """Strings by length, patterns that must all match, excluded texts, and possible values."""

    least: int = 0
    most: int | None = None
    patterns: tuple[Pattern, ...] = ()
    excluded: tuple[str, ...] = ()
    values: tuple[str, ...] | None = None

    def __and__(self, other: Strings) -> Strings:
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            values = tuple(value for value in self.values if value in other.values)
        return Strings(
            max(self.least, other.least),
            smaller(self.most, other.most),
            tuple(dict.fromkeys(self.patterns + other.patterns)),
            tuple(dict.fromkeys(self.excluded + other.excluded)),
            values,
        )


@dataclass(frozen=True, slots=True)
class Contains:
    """Items that an array must contain, and their least number."""

    demands: Demands
    least: int
    at: Node


@dataclass(frozen=True, slots=True)
class Arrays:
    """Arrays: demands on each item by its place, and the number of items."""

    prefix: tuple[Demands, ...] = ()
    rest: Demands = ()
    least: int = 0
    most: int | None = None
    contains: tuple[Contains, ...] = ()
    unique: tuple[Node, ...] = ()
    """Schemas that demand unique items."""

    def __and__(self, other: Arrays) -> Arrays:
        return Arrays(
            tuple(
                joined(self.rest if mine is None else mine, other.rest if theirs is None else theirs)
                for mine, theirs in zip_longest(self.prefix, other.prefix)
            ),
            joined(self.rest, other.rest),
            max(self.least, other.least),
            smaller(self.most, other.most),
            self.contains + other.contains,
            self.unique + other.unique,
        )


@dataclass(frozen=True, slots=True)
class Layer:
    """Demands of one schema on the members of an object."""

    at: Node
    properties: dict[str, Node]
    patterns: tuple[tuple[Pattern, Node], ...]
    extra: Node | None
    """Schema of members that are neither among the properties nor match a pattern."""


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects: layers to fulfil, required names, demands on all names, and the number of members."""

    layers: tuple[Layer, ...] = ()
    required: tuple[str, ...] = ()
    names: Demands = ()
    least: int = 0
    most: int | None = None
    counted: tuple[Node, ...] = ()
    """Schemas that limit the number of members."""

    def __and__(self, other: Objects) -> Objects:
        return Objects(
            self.layers + tuple(layer for layer in other.layers if layer not in self.layers),
            tuple(dict.fromkeys(self.required + other.required)),
            joined(self.names, other.names),
            max(self.least, other.least),
            smaller(self.most, other.most),
            self.counted + other.counted,
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a value. None for a type: the value may not be of that type."""

    null: bool = True
    booleans: frozenset[bool] = frozenset({True, False})
    numbers: Numbers | None = field(default_factory=Numbers)
    strings: Strings | None = field(default_factory=Strings)
    arrays: Arrays | None = field(default_factory=Arrays)
    objects: Objects | None = field(default_factory=Objects)

    def __and__(self, other: Shape) -> Shape:
        return Shape(
            self.null and other.null,
            self.booleans & other.booleans,
            None if self.numbers is None or other.numbers is None else self.numbers & other.numbers,
            None if self.strings is None or other.strings is None else self.strings & other.strings,
            None if self.arrays is None or other.arrays is None else self.arrays & other.arrays,
            None if self.objects is None or other.objects is None else self.objects & other.objects,
        )

    @property
    def nothing(self) -> bool:
        """True if no type is left."""
        return (
            not self.null
            and not self.booleans
            and not any(each is not None for each in (self.numbers, self.strings, self.arrays, self.objects))
        )

    def only(self, types: frozenset[str]) -> Shape:
        """Shape restricted to some types."""
        numbers = self.numbers if types & {"number", "integer"} else None
        if numbers is not None and "number" not in types:
            numbers = replace(numbers, whole=True)
        return Shape(
            self.null and "null" in types,
            self.booleans if "boolean" in types else frozenset(),
            numbers,
            self.strings if "string" in types else None,
            self.arrays if "array" in types else None,
            self.objects if "object" in types else None,
        )


NOTHING = Shape(False, frozenset(), None, None, None, None)


def smaller(a: int | None, b: int | None) -> int | None:
    """Smaller one of two limits; None is no limit."""
    return b if a is None else a if b is None else min(a, b)


def exact(value: object) -> Fraction:
    """Exact value of a number in a schema."""
    return Fraction(str(value)) if not isinstance(value, int) else Fraction(value)
