"""Calls that a model begins before it has closed its reasoning.

They are calls if the answer ends behind them. Whoever only thinks of a call goes on thinking, or closes the reasoning
and answers; then they are part of the reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.common.text.tool_calls.parameter_types import Signature
from services.common.text.tool_calls.parser import OPEN, CallState, ToolCallParser


class EarlyCalls:
    """Follows calls within the reasoning, from behind the first `<tool_call>` on, and keeps their text.

    Args:
        begin: position of that `<tool_call>` in the whole text.
        functions: from ``signatures``.
    """

    def __init__(self, begin: int, functions: Mapping[str, Signature]) -> None:
        self.begin = begin
        self.text = ""
        """Text up to the call that is open: thoughts, if that is no call."""
        self.open_text = ""
        """Text of the call that is open: it may have the beginning of another in it."""
        self._functions = functions
        self._call: ToolCallParser | None = None
        self.begin_call("")

    @property
    def reads(self) -> bool:
        """A call is open; otherwise what follows the last one is to be looked at."""
        return self._call is not None

    def begin_call(self, space: str) -> None:
        """A `<tool_call>` follows, behind white space."""
        self.text += space + OPEN
        self._call = self._parser()

    def feed(self, text: str, *, final: bool) -> str | None:
        """Takes more text of the open call.

        Returns:
            What of it does not belong to that call; None: it is no call.
        """
        call = self._call
        if call is None:
            raise RuntimeError("text of a call is read, but none is open")
        self.open_text += text
        call.feed(text, final=final)
        if call.state is CallState.NOT_A_CALL:
            return None
        if call.state is CallState.READING:
            return ""
        self.text += self.open_text.removesuffix(call.rest)
        self.open_text = ""
        self._call = self._parser() if call.another else None
        return call.rest

    def _parser(self) -> ToolCallParser:
        return ToolCallParser(0, self._functions)
