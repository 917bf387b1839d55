"""Qwen's tool calls: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

Also read: the JSON form of earlier Qwen models, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The parser is a machine that decides from the text so far and a bounded look ahead, so the pieces in which text arrives
cannot matter. A call is announced when the tag after its name is read. What turns out not to be a call before that is
text; what does not belong to a call after that ends the call and is text.
"""

from __future__ import annotations

import enum
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from services.gateway.text.json_scan import JsonScan
from services.gateway.text.parameters import Types, type_of_parameter
from services.gateway.text.parameters import parameter_types as parameter_types
from services.gateway.text.stops import Stops
from services.gateway.text.values import StoppedInValue, ValueWriter, check_json, escape
from services.gateway.text.values import encode_value as encode_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_SPACE = " \t\r\n"
_LONGEST_SPACE = 64
_LONGEST_NAME = 256

_AFTER_VALUE = (PARAMETER, END_FUNCTION, CLOSE, OPEN)
_AFTER_FUNCTION = (CLOSE, OPEN, FUNCTION)
_AFTER_CLOSE = (OPEN,)


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of a tool call: its start (``name`` and ``call_id`` set) or more of its arguments."""

    index: int
    arguments: str = ""
    name: str | None = None
    call_id: str | None = None


class CallState(enum.Enum):
    """Where a call is."""

    READING = enum.auto()
    COMPLETE = enum.auto()
    """``rest`` follows it."""
    NOT_A_CALL = enum.auto()
    """It was text all along: ``rest``."""


class _At(enum.Enum):
    HEAD = enum.auto()
    JSON = enum.auto()
    NAMED = enum.auto()
    PARAMETERS = enum.auto()
    VALUE = enum.auto()
    AFTER = enum.auto()


class _More(Exception):
    """The text so far does not decide."""


class ToolCallParser:
    """Reads one call, from behind `<tool_call>` on.

    Args:
        index: number of the call in its message.
        types: from ``parameter_types``.
        stops: what ends the answer where it is part of a value.
        begin: where in the answer's whole text the call begins.
    """

    def __init__(
        self, index: int, types: Mapping[str, Mapping[str, Types]], stops: Stops | None = None, begin: int = 0
    ) -> None:
        self.state = CallState.READING
        self.another = False
        """A second function follows in the same block."""
        self.stopped = False
        """A stop has ended it: its arguments are not complete."""
        self._stops = stops
        self._position = begin  # behind the buffer, in the answer's whole text
        self._index = index
        self._types = types
        self._buffer = ""
        self._read = ""  # what was read before the call was announced
        self._at = _At.HEAD
        self._name = ""
        self._announced = False
        self._keys: set[str] = set()
        self._value = ValueWriter(frozenset())
        self._scan = JsonScan()
        self._looked = 0  # up to here the buffer holds no end of the value
        self._final = False
        self._arguments: list[str] = []

    @property
    def announced(self) -> bool:
        """Its name was given out."""
        return self._announced

    @property
    def rest(self) -> str:
        """What was read but is not part of it."""
        return self._buffer

    @property
    def certain(self) -> int:
        """Up to here, in characters of the answer's whole text, it is read, and no stop can begin."""
        if self._at is _At.VALUE:
            return self._value.certain
        return self._position - len(self._buffer) - (0 if self._announced else len(self._read))

    def feed(self, text: str, *, final: bool = False) -> list[ToolDelta]:
        """Takes more text and returns what is certain; with ``final`` nothing follows."""
        self._buffer += text
        self._position += len(text)
        self._final = final
        deltas: list[ToolDelta] = []
        before = self._announced
        try:
            while self.state is CallState.READING:
                self._step()
        except _More:
            pass
        except StoppedInValue as stop:
            self._arguments.append(stop.written)
            self._buffer, self.stopped, self.state = "", True, CallState.COMPLETE
        if self._announced and not before:
            deltas.append(ToolDelta(self._index, name=self._name, call_id=f"call_{uuid.uuid4().hex[:24]}"))
        if arguments := "".join(self._arguments):
            deltas.append(ToolDelta(self._index, arguments))
        self._arguments = []
        return deltas

    def cut(self) -> list[ToolDelta]:
        """The text broke off inside the call: what there is of its value, or it becomes text."""
        if not self._announced:
            self._give_up()
            return []
        value = ""
        if self._at is _At.VALUE:
            # The buffer holds markup, whole or the beginning of it.
            ended = self._buffer.removeprefix("\n").startswith(END_PARAMETER)
            value = self._value.end() if ended else self._value.cut()
        self.state, self._buffer = CallState.COMPLETE, ""
        return [ToolDelta(self._index, value)] if value else []

    # -- one transition each; they raise _More when the text does not decide

    def _step(self) -> None:
        match self._at:
            case _At.HEAD:
                self._head()
            case _At.JSON:
                self._json()
            case _At.NAMED | _At.PARAMETERS:
                self._between()
            case _At.VALUE:
                self._read_value()
            case _At.AFTER:
                self._after()

    def _head(self) -> None:
        start = self._space()
        if self._buffer.startswith("{", start):
            self._take(start)
            self._at = _At.JSON
        elif self._tag(start, (FUNCTION,)) is None or (named := self._named(start, FUNCTION)) is None:
            self._give_up()
        else:
            self._name, end = named
            self._take(end)
            self._at = _At.NAMED

    def _json(self) -> None:
        end = self._scan.find_end(self._buffer)
        if end is None:
            if self._scan.broken or self._final:
                self._give_up()
                return
            raise _More
        call = _json_call(self._buffer[:end])
        if call is None:
            self._give_up()
            return
        self._name, arguments = call
        self._announced, self._at, self._buffer = True, _At.AFTER, self._buffer[end:]
        if self._stops is not None:
            check_json(arguments, self._stops, self._position - len(self._buffer))
        self._arguments.append(arguments)

    def _between(self) -> None:
        """After a name or a parameter."""
        start = self._space()
        tag = self._tag(start, _AFTER_VALUE if self._announced else (PARAMETER, END_FUNCTION, CLOSE))
        named = self._named(start, PARAMETER) if tag == PARAMETER else None
        if tag is None or (tag == PARAMETER and named is None):
            if self._announced:
                self._end_arguments(CallState.COMPLETE)
            else:
                self._give_up()
            return
        self._announced = True
        if named is not None:
            key, end = named
            self._buffer = self._buffer[end:]
            self._arguments.append(f"{', ' if self._keys else '{'}{escape(key, whole=True)}: ")
            self._keys.add(key)
            begin = self._position - len(self._buffer)
            self._value = ValueWriter(type_of_parameter(self._types, self._name, key), self._stops, begin)
            self._at, self._looked = _At.VALUE, 0
        elif tag == OPEN:
            self._buffer = self._buffer[start:]
            self._end_arguments(CallState.COMPLETE)
        else:
            self._buffer = self._buffer[start + len(tag) :]
            self._end_arguments(CallState.READING if tag == END_FUNCTION else CallState.COMPLETE)

    def _end_arguments(self, state: CallState) -> None:
        self._arguments.append("}" if self._keys else "{}")
        self._at, self.state = _At.AFTER, state

    def _after(self) -> None:
        """After `</function>`."""
        start = self._space()
        tag = self._tag(start, (CLOSE, FUNCTION))
        if tag is not None:
            self._buffer = self._buffer[start + (len(CLOSE) if tag == CLOSE else 0) :]
        self.another = tag == FUNCTION
        self.state = CallState.COMPLETE

    def _read_value(self) -> None:
        position = self._looked
        while True:
            position = self._buffer.find("<", position)
            if position < 0:
                self._hold(len(self._buffer))
            try:
                length = self._closing(position)
            except _More:
                self._hold(position)
            if length is not None:
                break
            position += 1
        self._arguments += (self._value.add(self._buffer[: self._before(position)]), self._value.end())
        self._buffer = self._buffer[position + length :]
        self._at = _At.PARAMETERS

    def _hold(self, end: int) -> NoReturn:
        """Writes the value up to ``end``, from where on the text does not decide.

        Raises:
            _More: always.
        """
        certain = self._before(end)
        self._arguments.append(self._value.add(self._buffer[:certain]))
        self._buffer, self._looked = self._buffer[certain:], end - certain
        if self._final:
            # What is left can only be a newline, before an end that never came.
            self._buffer = ""
            self._arguments.append(self._value.end())
            self._end_arguments(CallState.COMPLETE)
        raise _More

    def _before(self, position: int) -> int:
        """Where the value ends, if its markup begins at ``position``: the newline before belongs to the markup."""
        return position - 1 if position and self._buffer[position - 1] == "\n" else position

    def _closing(self, position: int) -> int | None:
        """Length of the markup to skip, if the value ends at ``position``; None if it goes on.

        `</parameter>` ends a value when a tag that may follow it does. Forgotten, it is the next parameter of the
        function, or the end of the function or call, that ends it.
        """
        tag = self._tag(position, (END_PARAMETER, END_FUNCTION, CLOSE, PARAMETER))
        match tag:
            case None:
                return None
            case "</parameter>":
                return len(tag) if self._followed(position + len(tag), _AFTER_VALUE) else None
            case "</function>":
                return 0 if self._followed(position + len(tag), _AFTER_FUNCTION) else None
            case "</tool_call>":
                return 0 if self._followed(position + len(tag), _AFTER_CLOSE) else None
        if self._before(position) == position:
            return None
        named = self._named(position, PARAMETER)
        declared = self._types.get(self._name, {})
        return 0 if named is not None and named[0] in declared and named[0] not in self._keys else None

    # -- looking ahead

    def _followed(self, position: int, tags: tuple[str, ...]) -> bool:
        """Whether one of the tags, or the end of the text, follows."""
        start = self._space(position)
        if self._final and start == len(self._buffer):
            return True
        return self._tag(start, tags) is not None

    def _space(self, position: int = 0) -> int:
        """Where white space ends.

        Raises:
            _More: more of it may follow.
        """
        end = position
        stop = min(len(self._buffer), position + _LONGEST_SPACE)
        while end < stop and self._buffer[end] in _SPACE:
            end += 1
        if end == len(self._buffer) and end < position + _LONGEST_SPACE and not self._final:
            raise _More
        return end

    def _tag(self, position: int, tags: tuple[str, ...]) -> str | None:
        """Which of the tags stands there.

        Raises:
            _More: one of them begins there.
        """
        for tag in tags:
            if self._buffer.startswith(tag, position):
                return tag
        left = len(self._buffer) - position
        if not self._final and any(left < len(tag) and tag.startswith(self._buffer[position:]) for tag in tags):
            raise _More
        return None

    def _named(self, position: int, tag: str) -> tuple[str, int] | None:
        """The name in a tag and the position behind it; None if it is not one.

        Raises:
            _More: the tag is not closed yet.
        """
        start = position + len(tag)
        text = self._buffer[start : start + _LONGEST_NAME + 1]
        stop = next((index for index, character in enumerate(text) if character in "<>\n"), None)
        if stop is None:
            if len(text) > _LONGEST_NAME or self._final:
                return None
            raise _More
        name = text[:stop].strip()
        return (name, start + stop + 1) if text[stop] == ">" and name else None

    def _take(self, length: int) -> None:
        self._read += self._buffer[:length]
        self._buffer = self._buffer[length:]

    def _give_up(self) -> None:
        self._buffer = self._read + self._buffer
        self.state = CallState.NOT_A_CALL


def _json_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of the JSON form."""
    try:
        call: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (call["name"] + written).encode()
    except ValueError:  # not a number, or not Unicode
        return None
    return call["name"], written
