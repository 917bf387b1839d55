"""Values of parameters: where each ends, and its JSON, written while its text arrives.

A value ends at the `</parameter>` that the template puts behind it, on a line of its own. Such lines of the value
itself are told from the end by counting: `</parameter>` closes what a line `<parameter=...>` has opened. A value that
leaves one open, or whose own end was forgotten, has no end by the count when all text is over; it ended at the best
place before.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from services.common.text.stops import Stops, StopSearch
from services.common.text.tool_calls.json_calls import Digits, as_integer, dumps, loads, with_integers
from services.common.text.tool_calls.parameter_types import Parameter, Types, kind_of


@dataclass(frozen=True, slots=True)
class ValueEnd:
    """Place where a value may have ended.

    Args:
        position: of the markup.
        length: of the markup that belongs to the value.
    """

    position: int
    length: int


@dataclass(slots=True)
class Nesting:
    """The lines of one value so far."""

    depth: int = 0
    """Parameters of the value itself that are open."""
    doubt: ValueEnd | None = None
    """First place where the value ended if a model has forgotten something."""
    _forgotten: ValueEnd | None = None
    """First place outside of all nested parameters where something was forgotten."""
    _ends: dict[int, ValueEnd] = field(default_factory=dict)
    """First place that looks like the end in all but the count, by the depth behind it."""

    @property
    def place(self) -> ValueEnd | None:
        """Place where the value ended, all text having been read."""
        found = [*self._ends.values(), *([] if self._forgotten is None else [self._forgotten])]
        return min(found, key=lambda place: place.position, default=self.doubt)

    def open(self, forgotten: ValueEnd | None) -> None:
        """A line opens a parameter; ``forgotten``: the value ended before it, without a tag."""
        self._remember(forgotten)
        self.depth += 1

    def close(self, end: ValueEnd | None, forgotten: ValueEnd | None) -> None:
        """A line closes a parameter.

        Args:
            end: what follows is what the template puts behind a value.
            forgotten: it is what a model puts there that forgets something.
        """
        if not self.depth and forgotten is not None:
            self._remember(forgotten)
            return
        self.depth = depth = max(0, self.depth - 1)
        lowest = depth if end is None else depth + 1
        # What goes on as text was no end.
        self._ends = {below: place for below, place in self._ends.items() if below < lowest}
        if end is not None:
            self._ends.setdefault(depth, end)
        elif not depth:
            self._forgotten = None

    def _remember(self, forgotten: ValueEnd | None) -> None:
        if not self.depth:
            self._forgotten = self._forgotten or forgotten


_SPACE = " \t\r\n"
_NULLS = ("null", "none")
_LONGEST_NULL = 64
_NUMERIC = tuple("-0123456789")
_OR_NULL = frozenset(("string", "null"))


def encode_value(text: str, types: Types, schema: Any = None, root: Any = None) -> str:
    """The JSON of one parameter's text: a string unless its schema says otherwise and the text agrees.

    Args:
        text: with the newlines of the markup around it.
        types: JSON types that the parameter may have.
        schema: of the parameter, for what an array or object has in it.
        root: the document in which the schema's references are looked up.
    """
    value = text.removeprefix("\n").removesuffix("\n")
    if types - {"string"}:
        bare = value.strip(_SPACE)
        lowered = bare.lower()
        if "boolean" in types and lowered in ("true", "false"):
            return lowered
        if "null" in types and lowered in _NULLS and len(value) <= _LONGEST_NULL:
            return "null"
        written = _number(bare, types) if bare[:1] in _NUMERIC else _container(bare, types, schema, root)
        if written is not None:
            return written
    return escape(value, whole=True)


def _number(bare: str, types: Types) -> str | None:
    """The text if it is a number of these types, with its own digits; None: it is a text."""
    try:
        number = loads(bare)
    except ValueError:
        return None
    if "number" in types or (number.whole and "integer" in types):
        return bare
    # Where a text may stand as well, "5.0" is one: it may be a version.
    return as_integer(bare) if "integer" in types and "string" not in types else None


def _container(bare: str, types: Types, schema: Any, root: Any) -> str | None:
    try:
        value = loads(bare)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict | list) and kind_of(value) in types:
        # As it was written: what is no Unicode stays behind its escape.
        return with_integers(bare, schema, root)
    return None


def escape(text: str, *, whole: bool = False) -> str:
    """Text inside a JSON string, with its quotes if it is the ``whole``. Pieces joined are the escape of the whole."""
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted if whole else quoted[1:-1]


class StoppedInValue(Exception):
    """A stop ends the answer inside a value."""

    def __init__(self, written: str) -> None:
        self.written = written
        """The JSON of what there is of the value, as far as it was not returned; it is not closed."""


def check_json(arguments: str, stops: Stops, end: int) -> None:
    """Looks for stop strings in the values of arguments that come in one piece, as an object.

    Args:
        arguments: its JSON.
        stops: what ends the answer.
        end: where in the answer's whole text the object ends: it is known from there on.

    Raises:
        StoppedInValue: one is in a value.
    """
    before = "{"
    for key, value in loads(arguments).items():
        before += f"{escape(key, whole=True)}: "
        is_text = isinstance(value, str) and not isinstance(value, Digits)
        text = value if is_text else dumps(value)
        begin = stops.find(text, end)
        if begin is not None:
            raise StoppedInValue(before + (f'"{escape(text[:begin])}' if is_text else text[:begin]))
        before += dumps(value) + ", "


class ValueWriter:
    """Writes what is certain to be a string at once, and everything else when it is complete.

    Args:
        parameter: what its schema says; no types: a string.
        stops: what ends the answer, and so the value.
        begin: where in the answer's whole text the value begins.
    """

    def __init__(self, parameter: Parameter, stops: Stops | None = None, begin: int = 0) -> None:
        self._search = None if stops is None else StopSearch(stops)
        self._stops = stops
        self._position = begin
        self._parameter = parameter
        self._types = types = parameter.types
        self._streams = not types - {"string"}
        self._held: list[str] = []
        self._fresh = True
        self._open = False

    @property
    def certain(self) -> int:
        """Place in the answer's whole text up to which no stop can begin in the value any more."""
        held_from = None if self._search is None else self._search.held_from
        return self._position if held_from is None else held_from

    def add(self, text: str) -> str:
        """Takes more of the text, the newline after the opening tag included; returns JSON.

        Raises:
            StoppedInValue: a stop is in it.
        """
        self._position += len(text)
        if self._fresh and text:
            text = text.removeprefix("\n")
            self._fresh = False
        if self._search is None or self._stops is None:
            return self._write(text)
        written = self._write(self._search.add(text, self._position - len(text)))
        if self._stops.found is not None:
            raise StoppedInValue(written + self.cut())
        return written

    def _write(self, text: str) -> str:
        if not self._streams:
            self._held.append(text)
            if self._types != _OR_NULL or not self._differs_from_null():
                return ""
            self._streams = True
            text, self._held = "".join(self._held), []
        if not text:
            return ""
        opening, self._open = "" if self._open else '"', True
        return opening + escape(text)

    def end(self) -> str:
        """The text is complete; returns the rest of the JSON."""
        rest = self._rest()
        if self._streams:
            return rest + ('"' if self._open else '""')
        # The newlines of the markup are gone already: encode_value must not take another.
        parameter = self._parameter
        return encode_value(f"\n{''.join(self._held)}\n", self._types, parameter.schema, parameter.root)

    def cut(self) -> str:
        """The text broke off; returns what there is of it, as it is."""
        return self._rest() + "".join(self._held)

    def _rest(self) -> str:
        """Text that was held back because a stop might have begun in it."""
        return "" if self._search is None else self._write(self._search.close())

    def _differs_from_null(self) -> bool:
        head = "".join(self._held)
        bare = head.strip(_SPACE).lower()
        return len(head) > _LONGEST_NULL or not any(word.startswith(bare) for word in _NULLS)
