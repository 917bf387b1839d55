"""Splits the text of a chat completion into reasoning, content and tool calls, piece by piece."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.text.tags import open_space, open_suffix
from services.gateway.text.tools import CLOSE, OPEN, ToolCallParser, ToolDelta, parameter_types

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the content, or of the reasoning before it."""

    text: str
    reasoning: bool = False


Delta = TextDelta | ToolDelta


class _State(enum.Enum):
    START = enum.auto()
    REASONING = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()


class ChatParser:
    """Incremental parser of one choice.

    White space next to a tag belongs to the markup, as the chat template writes it, and is not part of either side.

    Args:
        thinking: the prompt ends in an open `<think>`, so the text begins with reasoning.
        tools: the request's tools; empty: `<tool_call>` is ordinary text.
        parallel: more than one call may follow; otherwise the text ends with the first.
    """

    def __init__(self, *, thinking: bool, tools: Sequence[Mapping[str, Any]] = (), parallel: bool = True) -> None:
        self._state = _State.REASONING if thinking else _State.START
        self._tools = bool(tools)
        self._parallel = parallel
        self._types = parameter_types(tools)
        self._buffer = ""
        self._fresh = True  # nothing of the present part was given out: leading newlines are markup
        self._call: ToolCallParser | None = None
        self._calls = 0
        self._done = False

    @property
    def calls(self) -> int:
        """Tool calls completed."""
        return self._calls

    @property
    def in_reasoning(self) -> bool:
        return self._state is _State.REASONING

    @property
    def ended(self) -> bool:
        """No more text is wanted: the one tool call that was allowed is complete."""
        return self._done

    def feed(self, text: str) -> list[Delta]:
        """Takes more text and returns what is certain."""
        self._buffer += text
        deltas: list[Delta] = []
        while not self._done and self._advance(deltas):
            continue
        return deltas

    def finish(self, *, complete: bool) -> list[Delta]:
        """The text is over. ``complete``: the model ended it, so an open tool call counts as far as it is written."""
        deltas: list[Delta] = []
        if self._done:
            return deltas
        if self._state is _State.CALL and self._call is not None:
            deltas += self._call.feed(self._buffer)
            closing = self._call.close() if complete else None
            if closing is not None:
                self._calls += 1
                deltas += closing
            elif not self._call.started:
                deltas.append(TextDelta(OPEN + self._call.raw))
        elif self._state is _State.REASONING:
            self._emit(deltas, self._buffer.rstrip(), reasoning=True)
        elif not (self._calls and not self._buffer.strip()):
            self._fresh = self._fresh and self._state is not _State.START
            self._emit(deltas, self._buffer)
        self._buffer = ""
        self._done = True
        return deltas

    def _advance(self, deltas: list[Delta]) -> bool:
        """One transition; False when more text is needed."""
        match self._state:
            case _State.START:
                return self._begin()
            case _State.REASONING:
                return self._reason(deltas)
            case _State.CONTENT:
                return self._answer(deltas)
            case _State.CALL:
                return self._read_call(deltas)

    def _begin(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            self._buffer = text[len(THINK) :]
            self._state = _State.REASONING
            return True
        if THINK.startswith(text):
            return False
        self._state = _State.CONTENT
        self._fresh = False
        return True

    def _reason(self, deltas: list[Delta]) -> bool:
        before, tag, after = self._buffer.partition(END_THINK)
        if tag:
            self._emit(deltas, before.rstrip(), reasoning=True)
            self._buffer, self._state, self._fresh = after, _State.CONTENT, True
            return True
        certain = self._buffer[: len(self._buffer) - open_suffix(self._buffer, (END_THINK,))]
        self._give(deltas, len(certain) - open_space(certain), reasoning=True)
        return False

    def _answer(self, deltas: list[Delta]) -> bool:
        if not self._tools:
            self._give(deltas, len(self._buffer))
            return False
        before, tag, after = self._buffer.partition(OPEN)
        if tag:
            self._emit(deltas, before.rstrip())
            self._call = ToolCallParser(self._calls, self._types)
            self._buffer, self._state = after, _State.CALL
            return True
        certain = self._buffer[: len(self._buffer) - open_suffix(self._buffer, (OPEN,))]
        self._give(deltas, len(certain) - open_space(certain))
        return False

    def _read_call(self, deltas: list[Delta]) -> bool:
        call = self._call
        if call is None:
            raise RuntimeError("a tool call is being read, but there is no parser for it")
        inside, tag, after = self._buffer.partition(CLOSE)
        if not tag:
            certain = len(self._buffer) - open_suffix(self._buffer, (CLOSE,))
            deltas += call.feed(self._buffer[:certain])
            self._buffer = self._buffer[certain:]
            return False
        deltas += call.feed(inside)
        closing = call.close()
        self._buffer, self._state, self._call = after, _State.CONTENT, None
        if closing is None:
            deltas.append(TextDelta(OPEN + call.raw + CLOSE))
            self._fresh = False
        else:
            deltas += closing
            self._calls += 1
            self._fresh = True
            self._done = not self._parallel
        return True

    def _give(self, deltas: list[Delta], length: int, *, reasoning: bool = False) -> None:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        self._emit(deltas, text, reasoning=reasoning)

    def _emit(self, deltas: list[Delta], text: str, *, reasoning: bool = False) -> None:
        if self._fresh:
            text = text.lstrip("\n")
        if text:
            self._fresh = False
            deltas.append(TextDelta(text, reasoning))
