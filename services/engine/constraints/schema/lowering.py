"""Lowering of a schema to the rules of a grammar: one rule for every set of demands on a value."""

from __future__ import annotations

import json
from collections import deque
from fractions import Fraction

from services.common.json_schema.numbers import Numbers, NumbersError, decimals, written
from services.engine.constraints.refusal import Refused
from services.engine.constraints.schema.arrays import array
from services.engine.constraints.schema.document import Document
from services.engine.constraints.schema.members import MemberReader
from services.engine.constraints.schema.objects import ObjectRules
from services.engine.constraints.schema.overlap import OverlapCheck
from services.engine.constraints.schema.probe import Probe
from services.engine.constraints.schema.reading import Reader
from services.engine.constraints.schema.rules import Expression, Literal, OneOf, Rule, Schema, Terminal, Writer
from services.engine.constraints.schema.shapes import Demands, Shape
from services.engine.constraints.schema.strings import StringTerminals, spelled

_MOST_RULES = 50_000
_MOST_LISTED = 64
_EXACT_DIGITS = 9
"""Most digits of numbers that llguidance computes with exactly."""
_BLANKS = r"\n[ \t]{0,64}| {1,2}"
_HEAD = f"""%llguidance {{"no_forcing": true, "ignore_once": true}}
%ignore /{_BLANKS}/
"""
"""Head of a grammar. At most one of these blanks may be between two tokens of JSON: with any number of blanks, a model
can go on for ever."""


def lark(document: Document, demands: Demands, probe: Probe) -> str:
    """Grammar of the values that fulfil some schemas of a document. It is used alone, or inside another one.

    Raises:
        Refused: it cannot be enforced, with its place and its keyword; or no value fulfils it.
    """
    return _Lowering(document, probe).lark(demands)


class _Lowering:
    def __init__(self, document: Document, probe: Probe) -> None:
        self._strings = StringTerminals(probe)
        overlap = OverlapCheck(self._strings)
        self._reader = overlap.reader = Reader(document, overlap.overlap)
        self._members = overlap.members = MemberReader(self._reader, self._strings)
        self._objects = ObjectRules(self._value, self._define)
        self._rules: dict[str, Expression] = {}
        self._names: dict[frozenset[int], str] = {}
        self._places: dict[str, str] = {}
        self._waiting: deque[tuple[str, Demands]] = deque()

    def lark(self, demands: Demands) -> str:
        first = self._value(demands)
        while self._waiting:
            name, wanted = self._waiting.popleft()
            self._rules[name] = self._alternatives(wanted)
        grammar = Writer(self._rules).lark(first.name)
        if grammar is None:
            raise self._contradiction()
        return _HEAD + grammar

    def _contradiction(self) -> Refused:
        """Refusal that names the first schema which no value fulfils by itself, if there is one."""
        place = next((place for name, place in self._places.items() if self._rules[name] == OneOf()), None)
        return Refused(f"{place or '#'}: no output can fulfil it: its demands contradict each other")

    def _value(self, demands: Demands) -> Rule:
        """Rule of a value; it is defined later, because schemas may refer to themselves."""
        key = frozenset(node.number for node in demands)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"v{len(self._names)}"
            self._places[name] = demands[0].path if demands else "#"
            self._waiting.append((name, demands))
            self._count(demands)
        return Rule(name)

    def _define(self, expression: Expression) -> Expression:
        name = f"r{len(self._rules)}"
        self._rules[name] = expression
        self._count(())
        return Rule(name)

    def _count(self, demands: Demands) -> None:
        if len(self._rules) + len(self._waiting) > _MOST_RULES:
            place = f"{demands[0].path}: " if demands else ""
            raise Refused(f"{place}the schema is too complex: it has more than {_MOST_RULES} rules")

    def _alternatives(self, demands: Demands) -> Expression:
        place = demands[0].path if demands else "#"
        try:
            options = [option for shape in self._reader.alternatives(demands) for option in self._shape(shape)]
        except NumbersError as error:
            raise Refused(f"{place}: {error}") from None
        except Refused as error:
            # A refusal that knows its place begins with it.
            raise error if str(error).startswith("#") else Refused(f"{place}: {error}") from None
        return OneOf(tuple(options))

    def _shape(self, shape: Shape) -> list[Expression]:
        found: list[Expression] = [Literal("null")] if shape.null else []
        found += [Literal("true" if value else "false") for value in sorted(shape.booleans, reverse=True)]
        if shape.numbers is not None:
            found += _number(shape.numbers)
        if shape.strings is not None:
            strings = self._strings.terminal(shape.strings)
            if strings is not None:
                found.append(Terminal(strings))
        if shape.arrays is not None:
            found.append(array(shape.arrays, self._value, self._listed))
        if shape.objects is not None:
            known = self._members.known(shape.objects)
            if known is not None:
                others = self._members.others(shape.objects, known)
                found.append(self._objects.rules(shape.objects, known, others))
        return found

    def _listed(self, demands: Demands) -> list[str] | None:
        """Texts of all values under some demands if they are few scalars, else None."""
        texts: dict[str, None] = {}
        for shape in self._reader.alternatives(demands):
            if shape.arrays is not None or shape.objects is not None:
                return None
            if shape.null:
                texts["null"] = None
            texts.update(dict.fromkeys("true" if value else "false" for value in shape.booleans))
            if shape.numbers is not None:
                numbers = shape.numbers.texts()
                if numbers is None:
                    return None
                texts.update(dict.fromkeys(numbers))
            if shape.strings is not None:
                values = shape.strings.values
                if values is None:
                    return None
                texts.update(
                    dict.fromkeys(spelled(value) for value in values if self._strings.accepts(shape.strings, value))
                )
        return list(texts)


def _number(numbers: Numbers) -> list[Expression]:
    try:
        expression = numbers.expression()
    except NumbersError:
        multiples = _multiples(numbers)
        if multiples is None:
            raise
        return [multiples]
    return [] if expression is None else [Terminal(f"/{expression}/")]


def _multiples(numbers: Numbers) -> Schema | None:
    """Multiples of a number that divides no power of ten, which llguidance counts while it reads the digits; None: that
    is not exact, or there are none."""
    step = numbers.step
    if step is not None and not numbers.is_whole:
        # Without bounds the model could write fractions with more digits than readers distinguish.
        most = Fraction(10**_EXACT_DIGITS - 1) / 10 ** min(decimals(step), _EXACT_DIGITS)
        numbers &= Numbers(low=-most if numbers.low is None else None, high=most if numbers.high is None else None)
    found = numbers.multiples()
    if found is None:
        return None
    step, low, high = found
    if low is not None and high is not None and low > high:
        return None
    bounds = {"multipleOf": step, "minimum": low, "maximum": high}
    if any(value is not None and _digits(value) > _EXACT_DIGITS for value in bounds.values()):
        return None
    keywords = "".join(f'"{key}": {written(value)}, ' for key, value in bounds.items() if value is not None)
    kind = "integer" if numbers.is_whole else "number"
    return Schema(f'{{"type": "{kind}", {keywords}"x-guidance": {json.dumps({"whitespace_pattern": _BLANKS})}}}')


def _digits(value: Fraction) -> int:
    return len(written(value).strip("-").replace(".", ""))
