"""The text of one parameter as JSON, written while it arrives."""

from __future__ import annotations

import json
from typing import Any

from services.gateway.text.parameters import Types, kind_of

_SPACE = " \t\r\n"
_NULLS = ("null", "none")
_LONGEST_NULL = 64
_OR_NULL = frozenset(("string", "null"))


def encode_value(text: str, types: Types) -> str:
    """The JSON of one parameter's text: a string unless its schema says otherwise and the text agrees."""
    value = text.removeprefix("\n").removesuffix("\n")
    if types - {"string"}:
        bare = value.strip(_SPACE)
        lowered = bare.lower()
        if "boolean" in types and lowered in ("true", "false"):
            return lowered
        if "null" in types and lowered in _NULLS and len(value) <= _LONGEST_NULL:
            return "null"
        try:
            parsed = json.loads(bare, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            parsed = value
        if not isinstance(parsed, str) and _matches(parsed, types):
            # As it was written: numbers keep their digits, and what is no Unicode stays behind its escape.
            return bare
    return escape(value, whole=True)


def escape(text: str, *, whole: bool = False) -> str:
    """Text inside a JSON string, with its quotes if it is the ``whole``. Pieces joined are the escape of the whole."""
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted if whole else quoted[1:-1]


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _matches(value: Any, types: Types) -> bool:
    kind = kind_of(value)
    return kind in types or (kind == "integer" and "number" in types)


class ValueWriter:
    """Writes what is certain to be a string at once, and everything else when it is complete.

    Args:
        types: JSON types that the parameter may have; none: a string.
    """

    def __init__(self, types: Types) -> None:
        self._types = types
        self._streams = not types - {"string"}
        self._held: list[str] = []
        self._fresh = True
        self._open = False

    def add(self, text: str) -> str:
        """Takes more of the text, the newline after the opening tag included; returns JSON."""
        if self._fresh and text:
            text = text.removeprefix("\n")
            self._fresh = False
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
        if self._streams:
            return '"' if self._open else '""'
        # The newlines of the markup are gone already: encode_value must not take another.
        return encode_value(f"\n{''.join(self._held)}\n", self._types)

    def cut(self) -> str:
        """The text broke off; returns what there is of it, as it is."""
        return "".join(self._held)

    def _differs_from_null(self) -> bool:
        head = "".join(self._held)
        bare = head.strip(_SPACE).lower()
        return len(head) > _LONGEST_NULL or not any(word.startswith(bare) for word in _NULLS)
