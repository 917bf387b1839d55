"""Qwen's tool calls: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

Also read: the JSON form of earlier Qwen models, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
_END_FUNCTION = re.compile(r"\s*</function>")
_END_PARAMETER = "</parameter>"
_SCALARS = {"string", "integer", "number", "boolean", "object", "array", "null"}


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of a tool call: its start (``name`` and ``call_id`` set) or more of its arguments."""

    index: int
    arguments: str = ""
    name: str | None = None
    call_id: str | None = None


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, frozenset[str]]]:
    """JSON types that each parameter of each function may have, as far as its schema says so."""
    found: dict[str, dict[str, frozenset[str]]] = {}
    for tool in tools:
        function = tool.get("function", {})
        properties = (function.get("parameters") or {}).get("properties")
        if isinstance(properties, Mapping):
            found[function.get("name", "")] = {key: _types(schema) for key, schema in properties.items()}
    return found


def _types(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    # Nobody has checked that it is a JSON schema: what is not one says nothing.
    named = {kind for kind in _members(schema.get("type")) if isinstance(kind, str)}
    for union in ("anyOf", "oneOf"):
        for member in _members(schema.get(union)):
            named |= _types(member)
    if not named and isinstance(schema.get("enum"), list):
        named = {"string"} if all(isinstance(value, str) for value in schema["enum"]) else set(_SCALARS)
    return frozenset(named)


def _members(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def encode_value(text: str, types: frozenset[str]) -> str:
    """The JSON of one parameter's text: a string unless its schema says otherwise and the text agrees."""
    value = text.removeprefix("\n").removesuffix("\n")
    if types - {"string"}:
        lowered = value.strip().lower()
        if "boolean" in types and lowered in ("true", "false"):
            return lowered
        if "null" in types and lowered in ("null", "none"):
            return "null"
        try:
            parsed = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            parsed = value
        if not isinstance(parsed, str) and _matches(parsed, types):
            return json.dumps(parsed, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _matches(value: Any, types: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if value is None:
        return "null" in types
    if isinstance(value, int):
        return bool(types & {"integer", "number"})
    if isinstance(value, float):
        return "number" in types
    return ("array" if isinstance(value, list) else "object") in types


class ToolCallParser:
    """Reads what stands between `<tool_call>` and `</tool_call>`, piece by piece.

    Args:
        index: number of the call in its message.
        types: from ``parameter_types``.
    """

    def __init__(self, index: int, types: Mapping[str, Mapping[str, frozenset[str]]]) -> None:
        self._index = index
        self._types = types
        self._raw = ""
        self._rest = ""
        self._name: str | None = None
        self._parameters = 0
        self._ended = False  # </function> was read

    @property
    def raw(self) -> str:
        """Everything read so far, to be shown as text when it turns out not to be a call."""
        return self._raw

    @property
    def started(self) -> bool:
        """The name was read, so the call has been announced."""
        return self._name is not None

    def feed(self, text: str) -> list[ToolDelta]:
        """Takes text and returns what it completes."""
        self._raw += text
        self._rest += text
        deltas: list[ToolDelta] = []
        if self._name is None and (match := _FUNCTION.match(self._rest)):
            self._rest = self._rest[match.end() :]
            deltas.append(self._start(match[1].strip()))
        while self._name is not None and not self._ended and (delta := self._next_parameter()):
            deltas.append(delta)
        return deltas

    def close(self) -> list[ToolDelta] | None:
        """The block ended. Returns the last pieces, or None if it was not a call."""
        if self._name is None:
            return self._close_json()
        if not self._ended:
            # A parameter or the function was left open: what is there counts.
            match = _PARAMETER.match(self._rest)
            tail = self._rest[match.end() :].removesuffix("</function>") if match else ""
            pieces = [self._parameter(match[1].strip(), tail)] if match else []
            return [*pieces, self._end()]
        return []

    def _start(self, name: str) -> ToolDelta:
        self._name = name
        return ToolDelta(self._index, name=name, call_id=f"call_{uuid.uuid4().hex[:24]}")

    def _next_parameter(self) -> ToolDelta | None:
        if match := _END_FUNCTION.match(self._rest):
            self._rest = self._rest[match.end() :]
            return self._end()
        match = _PARAMETER.match(self._rest)
        if match is None or (end := self._rest.find(_END_PARAMETER, match.end())) < 0:
            return None
        value = self._rest[match.end() : end]
        self._rest = self._rest[end + len(_END_PARAMETER) :]
        return self._parameter(match[1].strip(), value)

    def _parameter(self, key: str, value: str) -> ToolDelta:
        types = self._types.get(self._name or "", {}).get(key, frozenset())
        opening = "{" if self._parameters == 0 else ", "
        self._parameters += 1
        return ToolDelta(self._index, f"{opening}{json.dumps(key, ensure_ascii=False)}: {encode_value(value, types)}")

    def _end(self) -> ToolDelta:
        self._ended = True
        return ToolDelta(self._index, "}" if self._parameters else "{}")

    def _close_json(self) -> list[ToolDelta] | None:
        try:
            call = json.loads(self._rest, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(arguments, dict):
            return None
        return [self._start(call["name"]), ToolDelta(self._index, json.dumps(arguments, ensure_ascii=False))]
