"""Calls in the JSON form of earlier Qwen models: where one ends, found while it arrives, and what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from services.gateway.text.tool_calls.numbers import Digits, dumps, loads, with_integers
from services.gateway.text.tool_calls.parameter_types import UNKNOWN, Signature

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
