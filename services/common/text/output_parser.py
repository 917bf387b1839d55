"""Splits the text of a chat completion into reasoning, content and tool calls, piece by piece."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.text.lookahead import open_space, open_suffix
from services.common.text.stops import Stops, StopSearch
from services.common.text.tool_calls.early_calls import EarlyCalls
from services.common.text.tool_calls.parameter_types import signatures
from services.common.text.tool_calls.parser import OPEN, CallState, ToolCallParser, ToolDelta

THINK, END_THINK = "<think>", "</think>"
_LONGEST_SPACE = 256
"""Characters of white space next to a tag that are markup; more would have to be held back without end."""
_MOST_THOUGHT_OF = 32
"""Calls within one reasoning that are looked behind; further ones are part of it at once."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the content, or of the reasoning before it."""

    text: str
    reasoning: bool = False


Delta = TextDelta | ToolDelta


class _State(enum.Enum):
    START = enum.auto()
    REASONING = enum.auto()
    EARLY_CALL = enum.auto()
    """The text is in or behind a call within the reasoning, which may be part of it."""
    CONTENT = enum.auto()
    CALL = enum.auto()


class ChatParser:
    """Incremental parser of one choice.

    White space next to a tag belongs to the markup, as the chat template writes it, and is not part of either side.

    Args:
        thinking: the prompt ends in an open `<think>`, so the text begins with reasoning.
        resumed: the answer goes on where a message of the prompt ends, so that newlines at its beginning are text.
        told: the end of that reasoning is told by ``end_reasoning``, because it is a token of its own; otherwise
            `</think>` is looked for in the text.
        told_calls: calls within reasoning are told by ``begin_call``, because `<tool_call>` is a token of its own and
            its letters are text; otherwise they are looked for.
        tools: the request's tools; empty: `<tool_call>` is ordinary text.
        parallel: more than one call may follow; otherwise the text ends with the first.
        stops: what ends the text where it is part of the content or of an argument; None: nothing does.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        resumed: bool = False,
        told: bool = False,
        told_calls: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        parallel: bool = True,
        stops: Stops | None = None,
    ) -> None:
        self._stops = stops
        self._search = None if stops is None else StopSearch(stops)  # of the content
        self._state = _State.REASONING if thinking else _State.START
        self._told = told and thinking
        self._told_calls: deque[int] | None = deque() if told_calls else None
        self._early: EarlyCalls | None = None
        self._space_before = ""  # of the early calls
        self._thought_of = 0
        self._tools = bool(tools)
        self._parallel = parallel
        self._functions = signatures(tools)
        self._buffer = ""
        self._position = 0  # of the buffer in the whole text
        self._reasoning_from = 0 if thinking else None
        self._reasoning_to: int | None = None
        self._fresh = not resumed  # nothing of the present part was given out: leading newlines are markup
        self._call: ToolCallParser | None = None
        self._raw = ""  # what introduced the call, to be shown when it is none
        self._calls = 0
        self._broken = False
        self._doubts = 0
        self._done = False
        self._complete = True  # whether the model ended the text, once it is over

    @property
    def calls(self) -> int:
        """Tool calls told, the last one as far as it is written."""
        return self._calls

    @property
    def broken(self) -> bool:
        """The text ended inside of the last call."""
        return self._broken

    @property
    def stopped(self) -> bool:
        """A stop was found: whatever follows is not part of the answer."""
        return self._stops is not None and self._stops.found is not None

    @property
    def certain(self) -> int:
        """End of the text, in characters of the whole, that no later text changes and in which no stop can begin."""
        held_from = None if self._search is None else self._search.held_from
        if held_from is not None:
            return held_from
        if self._early is not None:
            return self._early.begin - len(self._space_before)
        if self._call is not None:
            return self._call.certain - (0 if self._call.announced else len(self._raw))
        return self._position

    @property
    def awaits_end_of_reasoning(self) -> bool:
        """``end_reasoning`` is still to be called."""
        return self._told and self._reasoning_to is None

    @property
    def reasoning(self) -> tuple[int, int | None] | None:
        """Place of the reasoning in the whole text, in characters, its tags left out; the end is None while it goes on.
        None: there is none so far."""
        end = self._reasoning_to if self._early is None else self._early.begin
        return None if self._reasoning_from is None else (self._reasoning_from, end)

    @property
    def may_reason(self) -> bool:
        """More of the text may turn out to be reasoning."""
        return self._state in (_State.START, _State.REASONING, _State.EARLY_CALL)

    @property
    def may_end(self) -> bool:
        """The text may end before the model does: at a tool call or a stop."""
        return self._stops is not None or (self._tools and not self._parallel)

    @property
    def ended(self) -> bool:
        """No more text is wanted: the one tool call that was allowed is complete, or a stop was found."""
        return self._done or self.stopped

    def end_reasoning(self, position: int) -> None:
        """The `</think>` at this position of the whole text is the token, to be called before it is fed."""
        self._reasoning_to = position

    def begin_call(self, position: int) -> None:
        """The `<tool_call>` at this position of the whole text is the token, to be called before it is fed."""
        if self._told_calls is not None:
            self._told_calls.append(position)

    def feed(self, text: str) -> list[Delta]:
        """Takes more text and returns what is certain."""
        self._buffer += text
        deltas: list[Delta] = []
        while not self.ended and self._advance(deltas, final=False):
            continue
        return deltas

    def finish(self, *, complete: bool) -> list[Delta]:
        """The text is over. ``complete``: the model ended it, so an open tool call counts as far as it is written."""
        deltas: list[Delta] = []
        if self._done:
            return deltas
        self._complete = complete
        if self._call is not None and not complete:
            deltas += self._call.cut()
            self._broken = self._call.announced
            self._after_call(deltas, self._call)
        while not self.ended and self._advance(deltas, final=True):
            continue
        if not self.ended and not (self._calls and self._fresh and not self._buffer.strip()):
            self._emit(deltas, self._buffer, self._position)
        self._close_text(deltas)
        self._buffer = ""
        self._done = True
        return deltas

    def _advance(self, deltas: list[Delta], *, final: bool) -> bool:
        """One transition; False when more text is needed."""
        match self._state:
            case _State.START:
                return self._begin(final)
            case _State.REASONING:
                return self._reason(deltas, final)
            case _State.EARLY_CALL:
                return self._judge(deltas, final)
            case _State.CONTENT:
                return self._answer(deltas, final)
            case _State.CALL:
                return self._read_call(deltas, final)

    def _skip(self, length: int) -> str:
        """Takes text out of the buffer."""
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        self._position += length
        return text

    def _put_back(self, text: str) -> None:
        self._buffer = text + self._buffer
        self._position -= len(text)

    def _begin(self, final: bool) -> bool:
        text = self._buffer.lstrip()
        space = len(self._buffer) - len(text)
        if space <= _LONGEST_SPACE:
            if text.startswith(THINK):
                self._skip(space + len(THINK))
                self._reasoning_from = self._position
                self._state = _State.REASONING
                return True
            if THINK.startswith(text) and not final:
                return False
        self._state = _State.CONTENT
        self._fresh = False
        return True

    def _reason(self, deltas: list[Delta], final: bool) -> bool:
        end, certain = self._end_of_reasoning(final)
        call = self._next_call()
        if call is not None and call < certain:
            certain = call
            if len(self._buffer) >= call + len(OPEN):
                self._give(deltas, call - self._space(call), reasoning=True)
                self._space_before = self._skip(self._buffer.find(OPEN))
                self._early = EarlyCalls(self._position, self._functions)
                self._skip(len(OPEN))
                self._state = _State.EARLY_CALL
                return True
        elif end is not None and end + len(END_THINK) <= len(self._buffer):
            self._reasoning_to = self._position + end
            self._give(deltas, end - self._space(end), reasoning=True)
            self._skip(self._reasoning_to - self._position + len(END_THINK))
            self._state, self._fresh = _State.CONTENT, True
            return True
        self._give(deltas, certain - self._space(certain), reasoning=True)
        if final:
            self._skip(len(self._buffer))
        return False

    def _end_of_reasoning(self, final: bool) -> tuple[int | None, int]:
        """Place in the buffer where the reasoning ends, if that is known, and how much of the buffer is before it for
        certain."""
        length = len(self._buffer)
        if self._told:
            end = None if self._reasoning_to is None else self._reasoning_to - self._position
        else:
            found = self._buffer.find(END_THINK)
            end = None if found < 0 else found
        if end is not None:
            return end, min(end, length)
        return None, length - (0 if final or self._told else open_suffix(self._buffer, (END_THINK,)))

    def _next_call(self) -> int | None:
        """Place in the buffer of the next `<tool_call>` that may begin a call, though its text may not be there."""
        if not self._tools or self._thought_of >= _MOST_THOUGHT_OF:
            return None
        if self._told_calls is None:
            found = self._buffer.find(OPEN)
            open_ = open_suffix(self._buffer, (OPEN,))
            return found if found >= 0 else len(self._buffer) - open_ if open_ else None
        while self._told_calls and self._told_calls[0] < self._position:
            self._told_calls.popleft()
        return self._told_calls[0] - self._position if self._told_calls else None

    def _judge(self, deltas: list[Delta], final: bool) -> bool:
        """Reads on in a call within the reasoning, or decides by what follows it."""
        early = self._early
        if early is None:
            raise RuntimeError("calls within the reasoning are being read, but there are none")
        end, certain = self._end_of_reasoning(final)
        if early.reads:
            rest = early.feed(self._skip(certain), final=final and end is None and self._complete)
            if rest is None or (early.reads and not rest and (final or certain == end)):
                self._think_on(deltas, early)
                return True
            self._put_back(rest)
            return bool(rest) or not early.reads
        behind, call = self._buffer, self._next_call()
        if end is not None and not behind[:end].strip():
            if not final and len(behind) < end + len(END_THINK):
                return False
            behind = behind[end + len(END_THINK) :]
        elif call is not None and not behind[:call].strip():
            if len(behind) >= call + len(OPEN):
                early.begin_call(self._skip(call))
                self._skip(len(OPEN))
                return True
            if not final:
                return False
        elif not final and not behind[:certain].strip():
            return False
        if behind.strip() or (final and not self._complete):
            self._think_on(deltas, early)
        elif final:
            # They are the answer, and are read as such.
            self._early, self._state, self._fresh = None, _State.CONTENT, True
            self._reasoning_to = self._position = early.begin
            self._buffer = early.text
        return final or bool(behind.strip())

    def _think_on(self, deltas: list[Delta], early: EarlyCalls) -> None:
        """Goes on with the reasoning: what looked like calls was thought."""
        self._early, self._state = None, _State.REASONING
        self._thought_of += 1
        self._put_back(early.open_text)
        text = self._space_before + early.text
        self._emit(deltas, text, early.begin - len(self._space_before), reasoning=True)

    def _answer(self, deltas: list[Delta], final: bool) -> bool:
        if not self._tools:
            self._give(deltas, len(self._buffer))
            return False
        at = self._buffer.find(OPEN)
        if at >= 0:
            self._give(deltas, at - self._space(at))
            self._raw = self._skip(self._buffer.find(OPEN) + len(OPEN))
            self._start_call()
            return True
        certain = len(self._buffer) - (0 if final else open_suffix(self._buffer, (OPEN,)))
        self._give(deltas, certain - self._space(certain))
        return False

    def _start_call(self) -> None:
        self._call = ToolCallParser(
            self._calls, self._functions, doubts=self._doubts, stops=self._stops, begin=self._position
        )
        self._state = _State.CALL

    def _read_call(self, deltas: list[Delta], final: bool) -> bool:
        call = self._call
        if call is None:
            raise RuntimeError("a tool call is being read, but there is no parser for it")
        told = call.feed(self._skip(len(self._buffer)), final=final)
        if told:
            self._close_text(deltas)
        deltas += told
        if call.state is CallState.READING:
            return False
        self._after_call(deltas, call)
        return True

    def _after_call(self, deltas: list[Delta], call: ToolCallParser) -> None:
        """A call is over: what follows it is read, and what is none becomes text."""
        self._buffer = call.rest
        self._position -= len(call.rest)
        self._doubts = call.doubts
        raw, self._raw = self._raw, ""
        self._call, self._state = None, _State.CONTENT
        if call.state is CallState.NOT_A_CALL:
            self._emit(deltas, raw, self._position - len(raw))
            return
        self._calls += 1
        self._broken = self._broken or call.stopped
        self._fresh = True
        self._done = not self._parallel
        if call.another and not self._done:
            self._start_call()

    def _space(self, end: int) -> int:
        """Length of the white space before ``end`` that may be markup."""
        return open_space(self._buffer[max(0, end - _LONGEST_SPACE) : end])

    def _give(self, deltas: list[Delta], length: int, *, reasoning: bool = False) -> None:
        begin = self._position
        self._emit(deltas, self._skip(length), begin, reasoning=reasoning)

    def _emit(self, deltas: list[Delta], text: str, begin: int, *, reasoning: bool = False) -> None:
        """Gives out text that begins at a place of the whole text."""
        end = begin + len(text)
        if self._fresh:
            text = text.lstrip("\n")
        if not text:
            return
        self._fresh = False
        if self._search is not None and not reasoning:
            text = self._search.add(text, end - len(text))
        if text:
            deltas.append(TextDelta(text, reasoning))

    def _close_text(self, deltas: list[Delta]) -> None:
        """Gives out what of the content was held back because a stop might have begun in it."""
        if self._search is not None and (rest := self._search.close()):
            deltas.append(TextDelta(rest))
