"""Translation of items into the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from services.common.errors import InvalidRequest
from services.gateway.api.responses.to_chat.places import Location, dotted
from services.gateway.api.responses.to_chat.tools import INPUT, qualified
from services.gateway.protocol.responses.items import (
    CustomCallItem,
    CustomCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a chat, each with where the client said it."""

    messages: list[dict[str, Any]]
    sources: list[Location]
    """Locations of each message: where its first item is."""
    calls: dict[int, list[Location]]
    """Locations of the calls in each message."""

    def source_of(self, index: int, call: int | None = None) -> Location:
        """The field of the request that a message, or a call in it, was made of."""
        if call is not None and call < len(self.calls.get(index, ())):
            return self.calls[index][call]
        return self.sources[index] if index < len(self.sources) else ("input",)


class _Builder:
    """Joins items into messages: what the model said in one turn is one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.sources: list[Location] = []
        self.calls: dict[int, list[Location]] = {}
        self._called: set[str] = set()

    def add(self, item: Item, source: Location) -> None:
        """Takes the next item."""
        match item:
            case MessageItem(role="assistant"):
                self._assistant(source, fresh=("content", "tool_calls"))["content"] = item.text
            case MessageItem(role="user"):
                self._append({"role": "user", "content": item.text}, source)
            case MessageItem():
                self.instruct(item.text, source)
            case ReasoningItem() if item.text:
                turn = self._assistant(source, fresh=("content", "tool_calls"))
                turn["reasoning_content"] = turn.get("reasoning_content", "") + item.text
            case FunctionCallItem():
                _check_arguments(item.arguments, dotted((*source, "arguments")))
                self._call(item, item.arguments, source)
            case CustomCallItem():
                self._call(item, to_json({INPUT: item.input}).decode(), source)
            case FunctionCallOutputItem() | CustomCallOutputItem():
                self._answer(item, source)

    def instruct(self, text: str, source: Location) -> None:
        """Adds a system message."""
        self._append({"role": "system", "content": text}, source)

    def _call(self, item: FunctionCallItem | CustomCallItem, arguments: str, source: Location) -> None:
        self._called.add(item.call_id)
        function = {"name": qualified(item.name, item.namespace), "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._assistant(source).setdefault("tool_calls", []).append(call)
        self.calls.setdefault(len(self.messages) - 1, []).append(source)

    def _answer(self, item: FunctionCallOutputItem | CustomCallOutputItem, source: Location) -> None:
        if item.call_id not in self._called:
            raise InvalidRequest(
                f"no function_call before it has the call_id {item.call_id[:80]!r}: send the call as well, or the "
                "previous_response_id of the response that made it",
                param=dotted((*source, "call_id")),
            )
        self._append({"role": "tool", "tool_call_id": item.call_id, "content": item.text}, source)

    def _assistant(self, source: Location, *, fresh: Sequence[str] = ()) -> dict[str, Any]:
        """The model's turn that an item belongs to: a new one, if the last one has one of ``fresh``."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in fresh):
            self._append({"role": "assistant"}, source)
        return self.messages[-1]

    def _append(self, message: dict[str, Any], source: Location) -> None:
        self.messages.append(message)
        self.sources.append(source)


def _check_arguments(text: str, param: str) -> None:
    # Chat checks it, too, but can only say which message it is in.
    try:
        arguments = from_json(text) if text.strip() else {}
    except ValueError as error:
        raise InvalidRequest(f"{param} must be a JSON object: {error}", param=param) from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{param} must be a JSON object, and it is not an object", param=param)


def conversation(
    instructions: str | None,
    prior: Sequence[Item],
    given: Sequence[Item | None] | str,
    *,
    continues: str = "previous_response_id",
) -> Conversation:
    """The messages of instructions, the items of what is continued, and the input.

    Args:
        instructions: of the request.
        prior: items of the response or conversation that it continues.
        continues: the field that names that.
        given: its input; None: an item that nobody can read.

    Raises:
        InvalidRequest: a function's answer without its call.
    """
    builder = _Builder()
    if instructions is not None:
        builder.instruct(instructions, ("instructions",))
    for item in prior:
        builder.add(item, (continues,))
    if isinstance(given, str):
        builder.add(MessageItem(role="user", content=given), ("input",))
    else:
        for index, named in enumerate(given):
            if named is not None:
                builder.add(named, ("input", index))
    return Conversation(builder.messages, builder.sources, builder.calls)
