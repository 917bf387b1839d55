"""Calls in the JSON form of earlier Qwen models, and numbers of JSON by their digits: nothing is rounded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.text.tool_calls.parameter_types import UNKNOWN, Signature, resolve, types_of

_NUMBER = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?")
_LONGEST = 4096
"""Digits of a whole number that is written out; clients refuse longer ones."""
_LONGEST_EXPONENT = 9


class Digits(str):
    """A number as it is written; texts are plain strings."""

    __slots__ = ()

    @property
    def whole(self) -> bool:
        """True if the number is written as a whole one."""
        return self.removeprefix("-").isdigit()


def loads(text: str) -> Any:
    """A JSON value whose numbers are ``Digits``.

    Raises:
        ValueError: it is none; NaN and Infinity are none.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_int=Digits, parse_float=Digits, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def dumps(value: Any) -> str:
    """JSON, on one line, of a value that ``loads`` read.

    Raises:
        RecursionError: it is nested too deeply.
    """
    match value:
        case Digits():
            return str(value)
        case str():
            # A lone surrogate is no Unicode: it stays behind its escape.
            return json.dumps(value, ensure_ascii=not _is_unicode(value))
        case dict():
            return f"{{{', '.join(f'{dumps(key)}: {dumps(item)}' for key, item in value.items())}}}"
        case list():
            return f"[{', '.join(map(dumps, value))}]"
    return json.dumps(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_integer(number: str) -> str | None:
    """The integer that a JSON number is (JSON Schema 2020-12, 6.1.1: its fraction is zero), without point and exponent;
    None: it is none, or has more digits than anybody reads."""
    match = _NUMBER.fullmatch(number)
    if match is None:
        return None
    sign, whole, fraction, exponent = match.group(1), match.group(2), match.group(3) or "", match.group(4) or "0"
    digits = (whole + fraction).rstrip("0")
    if not digits.strip("0"):
        return "0"
    if len(exponent.lstrip("+-0")) > _LONGEST_EXPONENT:
        return None
    point = len(whole) + int(exponent)
    if len(digits) > point or point - len(whole + fraction) > _LONGEST:
        return None
    written = digits.ljust(point, "0").lstrip("0")
    return f"{sign}{written}" if len(written) <= max(_LONGEST, len(whole)) else None


def with_integers(text: str, schema: Any, root: Any) -> str:
    """A JSON value in which the numbers that a schema wants to be integers are written as such; the very text where
    nothing is to be changed. It is the same value: where alternatives disagree, any of them may say so."""
    try:
        value = loads(text)
        changed = _Rewriting(root).of(value, (schema,))
        return text if changed is value else dumps(changed)
    except (ValueError, RecursionError):
        return text


class _Rewriting:
    """Goes down a value and the schemas of its parts. What a place's schemas say is found out once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[tuple[int, ...], tuple[list[Mapping[str, Any]], bool]] = {}

    def of(self, value: Any, schemas: Sequence[Any]) -> Any:
        """The value itself where nothing changes."""
        alternatives, integer = self._look_up(schemas)
        if not alternatives:
            return value
        if isinstance(value, Digits):
            written = as_integer(value) if integer and not value.whole else None
            return value if written is None else Digits(written)
        if isinstance(value, dict):
            changed = {key: self.of(item, _of_key(alternatives, key)) for key, item in value.items()}
            return changed if any(changed[key] is not item for key, item in value.items()) else value
        if isinstance(value, list):
            items = [self.of(item, _of_place(alternatives, place)) for place, item in enumerate(value)]
            return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
        return value

    def _look_up(self, schemas: Sequence[Any]) -> tuple[list[Mapping[str, Any]], bool]:
        """All alternatives, and whether numbers are to be integers. Schemas are told apart by identity: they are parts
        of one document, which outlives this."""
        place = tuple(map(id, schemas))
        if place not in self._known:
            found: dict[int, Mapping[str, Any]] = {}
            for schema in schemas:
                self._gather(schema, found)
            alternatives = list(found.values())
            types = types_of({"anyOf": alternatives}, self._root)
            self._known[place] = alternatives, "integer" in types and "number" not in types
        return self._known[place]

    def _gather(self, schema: Any, found: dict[int, Mapping[str, Any]]) -> None:
        schema = resolve(schema, self._root)
        if not isinstance(schema, Mapping) or id(schema) in found:
            return
        found[id(schema)] = schema
        for union in ("anyOf", "oneOf", "allOf"):
            members = schema.get(union)
            for member in members if isinstance(members, list) else ():
                self._gather(member, found)


def _of_key(schemas: list[Mapping[str, Any]], key: str) -> list[Any]:
    found: list[Any] = []
    for schema in schemas:
        properties, patterns = schema.get("properties"), schema.get("patternProperties")
        if isinstance(properties, Mapping) and key in properties:
            found.append(properties[key])
        else:
            found.append(schema.get("additionalProperties"))
        found += patterns.values() if isinstance(patterns, Mapping) else ()
    return found


def _of_place(schemas: list[Mapping[str, Any]], place: int) -> list[Any]:
    found: list[Any] = []
    for schema in schemas:
        first = schema.get("prefixItems")
        found.append(first[place] if isinstance(first, list) and place < len(first) else schema.get("items"))
    return found


_STRUCTURE = re.compile(r'["{}\[\]]|[^\s\w:,.+\-]')
_IN_STRING = re.compile(r'["\\]')


class JsonScan:
    """Follows strings and brackets of a text that begins with `{`. Each character is looked at once."""

    def __init__(self) -> None:
        self.broken = False
        """The text cannot become JSON."""
        self._position = 0
        self._depth = 0
        self._in_string = False

    def find_end(self, text: str) -> int | None:
        """The position behind the object; None: it is not complete, or broken. ``text`` only grows between calls."""
        while not self.broken:
            match = (_IN_STRING if self._in_string else _STRUCTURE).search(text, self._position)
            if match is None:
                self._position = len(text)
                return None
            found = match.group()
            if found == "\\":
                if match.end() == len(text):
                    self._position = match.start()  # what it escapes has not arrived
                    return None
                self._position = match.end() + 1
                continue
            self._position = match.end()
            if found == '"':
                self._in_string = not self._in_string
            elif found in "{[":
                self._depth += 1
            elif found in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return self._position
            else:
                self.broken = True
        return None


def json_call(text: str, functions: Mapping[str, Signature]) -> tuple[str, str] | None:
    """Name and arguments of the JSON form."""
    try:
        call: Any = loads(text)
        if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not name:
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(name, Digits) or not isinstance(arguments, dict):
            return None
        (name + json.dumps(arguments, ensure_ascii=False)).encode()
        schema = functions.get(name, UNKNOWN).schema
        return name, with_integers(dumps(arguments), schema, schema)
    except (ValueError, RecursionError):  # not JSON, or not Unicode
        return None
