"""Overlap check: tells whether schemas exclude each other, as far as that can be found quickly."""

from __future__ import annotations

from services.common.json_schema.numbers import NumbersError
from services.engine.constraints.refusal import Refused
from services.engine.constraints.schema.members import MemberReader
from services.engine.constraints.schema.reading import Reader
from services.engine.constraints.schema.shapes import Arrays, Demands, Objects, Shape
from services.engine.constraints.schema.strings import StringTerminals

_DEEPEST = 4


class OverlapCheck:
    """Looks for values that fulfil two schemas at once.

    Args:
        strings: tells which texts a string shape has.
    """

    def __init__(self, strings: StringTerminals) -> None:
        self._strings = strings
        self.reader: Reader | None = None
        self.members: MemberReader | None = None

    def overlap(self, a: Shape, b: Shape) -> bool:
        """True if some value may have both shapes, also if that is not known."""
        return self._possible(a & b, 0)

    def _possible(self, shape: Shape, depth: int) -> bool:
        if shape.null or shape.booleans:
            return True
        try:
            if shape.numbers is not None and not shape.numbers.empty:
                return True
        except NumbersError:
            return True
        try:
            if shape.strings is not None and self._strings.terminal(shape.strings, one_spelling=True) is not None:
                return True
            if shape.arrays is not None and self._array(shape.arrays, depth):
                return True
            return shape.objects is not None and self._object(shape.objects, depth)
        except Refused:
            return True

    def _any(self, demands: Demands, depth: int) -> bool:
        if depth > _DEEPEST or self.reader is None:
            return True
        return any(self._possible(shape, depth) for shape in self.reader.alternatives(demands))

    def _array(self, arrays: Arrays, depth: int) -> bool:
        if arrays.most is not None and arrays.most < arrays.least:
            return False
        needed = [*arrays.prefix, arrays.rest][: min(arrays.least, len(arrays.prefix) + 1)]
        return all(self._any(demands, depth + 1) for demands in needed)

    def _object(self, objects: Objects, depth: int) -> bool:
        if self.members is None:
            return True
        known = self.members.known(objects)
        if known is None or (objects.most is not None and objects.most < max(objects.least, len(objects.required))):
            return False
        return all(self._any(member.value, depth + 1) for member in known if member.required)
