"""Qwen's tool calls: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

Also read: the JSON form of earlier Qwen models, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The parser is a machine that decides from the text so far and a bounded look ahead, so the pieces in which text arrives
cannot matter. A call is announced when the tag after its name is read. What turns out not to be a call before that is
text; what does not belong to a call after that ends the call and is text.

A value may have markup in it. It ends as the template ends it: at a `</parameter>` on a line of its own that closes
no `<parameter=...>` line of the value, when the next parameter or the end of the call is the next line. Where a model
has forgotten such an end, an earlier place is taken for it: from the first such place on, a value is held back until
the end that the template asks for, or the end of all text, has come.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from services.common.text.lookahead import Lookahead, NeedMoreText
from services.common.text.stops import Stops
from services.common.text.tool_calls.json_calls import JsonScan, json_call
from services.common.text.tool_calls.parameter_types import UNKNOWN, Parameter, Signature
from services.common.text.tool_calls.values import Nesting, StoppedInValue, ValueEnd, ValueWriter, check_json, escape
from services.common.text.tool_calls.values import encode_value as encode_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

_MOST_DOUBTS = 8
"""Places of one answer that are looked behind to the end of it; further ones are taken for the end of their value at
once, or time would grow with the square of the text."""

_END_CALL = f"{END_FUNCTION}\n{CLOSE}"
_NEXT_CALL = f"\n{OPEN}\n{FUNCTION}"
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
    """State of a call that is being read."""

    READING = enum.auto()
    COMPLETE = enum.auto()
    """``rest`` follows it."""
    NOT_A_CALL = enum.auto()
    """The call was text all along: ``rest``."""


class _At(enum.Enum):
    HEAD = enum.auto()
    JSON = enum.auto()
    NAMED = enum.auto()
    PARAMETERS = enum.auto()
    VALUE = enum.auto()
    AFTER = enum.auto()


class ToolCallParser(Lookahead):
    """Reads one call, from behind `<tool_call>` on.

    Args:
        index: number of the call in its message.
        functions: from ``signatures``.
        doubts: of the calls before it.
        stops: what ends the answer where it is part of a value.
        begin: where in the answer's whole text the call begins.
    """

    def __init__(
        self,
        index: int,
        functions: Mapping[str, Signature],
        *,
        doubts: int = 0,
        stops: Stops | None = None,
        begin: int = 0,
    ) -> None:
        self.state = CallState.READING
        self.another = False
        """A second function follows in the same block."""
        self.doubts = doubts
        """Times that a value turned out to have ended at an earlier place."""
        self.stopped = False
        """A stop has ended it: its arguments are not complete."""
        self._stops = stops
        self._position = begin  # behind the buffer, in the answer's whole text
        self._index = index
        self._functions = functions
        super().__init__()
        self._read = ""  # what was read before the call was announced
        self._at = _At.HEAD
        self._name = ""
        self._announced = False
        self._keys: set[str] = set()
        self._value = ValueWriter(Parameter())
        self._scan = JsonScan()
        self._looked = 0  # up to here the buffer holds no end of the value
        self._nesting = Nesting()
        self._held: list[str] = []  # of the value, since there is a doubt about it
        self._held_length = 0
        self._arguments: list[str] = []

    @property
    def announced(self) -> bool:
        """True once the call's name has been given out."""
        return self._announced

    @property
    def rest(self) -> str:
        """Text that was read but is not part of the call."""
        return self._buffer

    @property
    def certain(self) -> int:
        """End of the text that is read and in which no stop can begin, in characters of the answer's whole text."""
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
        except NeedMoreText:
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
            ended = not self._nesting.depth and self._buffer.removeprefix("\n").startswith(END_PARAMETER)
            try:
                value = self._value.add("".join(self._held))
                value += self._value.end() if ended else self._value.cut()
            except StoppedInValue as stop:
                value, self.stopped = stop.written, True
        self.state, self._buffer = CallState.COMPLETE, ""
        return [ToolDelta(self._index, value)] if value else []

    # -- one transition each; they raise NeedMoreText when the text does not decide

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
            raise NeedMoreText
        call = json_call(self._buffer[:end], self._functions)
        if call is None:
            self._give_up()
            return
        self._name, arguments = call
        self._announced, self._at, self._buffer = True, _At.AFTER, self._buffer[end:]
        if self._stops is not None:
            check_json(arguments, self._stops, self._position - len(self._buffer))
        self._arguments.append(arguments)

    def _between(self) -> None:
        """Reads on behind a name or a parameter."""
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
            self._value = ValueWriter(self._signature.of(key), self._stops, begin)
            self._nesting, self._held_length = Nesting(), 0
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
        """Reads on behind `</function>`."""
        start = self._space()
        tag = self._tag(start, (CLOSE, FUNCTION))
        if tag is not None:
            self._buffer = self._buffer[start + (len(CLOSE) if tag == CLOSE else 0) :]
        self.another = tag == FUNCTION
        self.state = CallState.COMPLETE

    def _read_value(self) -> None:
        position = self._looked
        while (position := self._buffer.find("<", position)) >= 0:
            self._looked = position
            try:
                length = self._end_of_value(position)
            except NeedMoreText:
                break
            if length is not None:
                self._end_value(position, length)
                return
            position = self._looked + 1
        self._looked = end = len(self._buffer) if position < 0 else position
        self._write(self._before(end))
        if not self._final:
            raise NeedMoreText
        self._looked, self._buffer = 0, "".join([*self._held, self._buffer])
        if (place := self._nesting.place) is not None:
            self.doubts += 1
            self._held = []
            self._end_value(place.position, place.length)
            return
        # What is left can only be a newline, before an end that never came.
        self._buffer = ""
        self._arguments.append(self._value.end())
        self._end_arguments(CallState.COMPLETE)

    def _write(self, length: int) -> None:
        """Takes so much of the value out of the buffer."""
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        self._looked -= length
        if self._nesting.doubt is None:
            self._arguments.append(self._value.add(text))
        else:
            self._held.append(text)
            self._held_length += length

    def _end_value(self, position: int, length: int) -> None:
        text = "".join([*self._held, self._buffer[: self._before(position)]])
        self._arguments += (self._value.add(text), self._value.end())
        self._buffer = self._buffer[position + length :]
        self._at, self._held = _At.PARAMETERS, []

    def _before(self, position: int) -> int:
        """End of the value, if its markup begins at ``position``: the newline before belongs to the markup."""
        return position - 1 if position and self._buffer[position - 1] == "\n" else position

    def _end_of_value(self, position: int) -> int | None:
        """Length of the markup to skip, if the value ends at ``position``; None if it goes on.

        Raises:
            NeedMoreText: what follows does not decide yet; nothing has changed.
        """
        tag = self._tag(position, (END_PARAMETER, END_FUNCTION, CLOSE, PARAMETER))
        if tag is None:
            return None
        nesting = self._nesting
        length = self._forgotten(position, tag)
        if length is not None and self.doubts >= _MOST_DOUBTS:
            return length
        own = self._on_its_own_line(position, tag)
        told = own and tag == END_PARAMETER and self._ends_as_told(position + len(tag) + 1, nested=nesting.depth > 0)
        if told and not nesting.depth:
            return len(tag)
        if length is not None and nesting.doubt is None:
            # From here on the value is held: this much is certain.
            certain = self._before(position)
            self._write(certain)
            position -= certain
            nesting.doubt, self._held_length = ValueEnd(position, length), 0
        at = self._held_length + position
        forgotten = None if length is None else ValueEnd(at, length)
        if own and tag == PARAMETER:
            nesting.open(forgotten)
        elif own:
            nesting.close(ValueEnd(at, len(tag)) if told else None, forgotten)
        return None

    def _on_its_own_line(self, position: int, tag: str) -> bool:
        """True if the tag is one of a parameter with nothing else in its line."""
        if tag not in (PARAMETER, END_PARAMETER) or self._before(position) == position:
            return False
        end = position + len(tag)
        if tag == PARAMETER:
            raw = self._raw_name(position, tag)
            if raw is None:
                return False
            end = raw[1]
        return self._tag(end, ("\n",)) is not None

    def _ends_as_told(self, position: int, *, nested: bool) -> bool:
        """True if the line there is the next parameter, or the end of the call. ``nested``: of any call, and there must
        be another behind it, or nothing."""
        tag = self._tag(position, (PARAMETER, _END_CALL))
        if tag == PARAMETER:
            named = self._named(position, tag)
            return named is not None and (nested or named[0] not in self._keys)
        if tag is None or not nested:
            return tag is not None
        end = position + len(tag)
        return self._tag(end, (_NEXT_CALL,)) is not None or (self._final and not self._buffer[end:].strip())

    def _forgotten(self, position: int, tag: str) -> int | None:
        """Length of the markup to skip, if a value whose end is not as it should be ends there.

        `</parameter>` ends it when a tag that may follow it does. Forgotten, it is the next parameter of the function,
        or the end of the function or call, that ends it.
        """
        match tag:
            case "</parameter>":
                return len(tag) if self._followed(position + len(tag), _AFTER_VALUE) else None
            case "</function>":
                return 0 if self._followed(position + len(tag), _AFTER_FUNCTION) else None
            case "</tool_call>":
                return 0 if self._followed(position + len(tag), _AFTER_CLOSE) else None
        if self._before(position) == position:
            return None
        named = self._named(position, PARAMETER)
        return 0 if named is not None and named[0] in self._signature.named and named[0] not in self._keys else None

    @property
    def _signature(self) -> Signature:
        return self._functions.get(self._name, UNKNOWN)

    def _take(self, length: int) -> None:
        self._read += self._buffer[:length]
        self._buffer = self._buffer[length:]

    def _give_up(self) -> None:
        self._buffer = self._read + self._buffer
        self.state = CallState.NOT_A_CALL
