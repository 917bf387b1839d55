"""The calls of a response as they grow: of functions, which take JSON, and of custom tools, which take text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from services.gateway.api.responses.streaming.items import Data, new_item_id
from services.gateway.api.responses.to_chat.tools import INPUT, Offer
from services.gateway.text.output_parser import TextDelta
from services.gateway.text.tool_calls.parser import ToolDelta

_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_READABLE = re.compile(r'(?:[^"\\]|\\(?:u(?![dD][89aAbB])[0-9a-fA-F]{4}|u[dD][89aAbB]..\\u[0-9a-fA-F]{4}|[^u]))*')
"""Text of a JSON string up to its end, or to a sequence that is not whole yet."""


class InputText:
    """The text of a custom tool's input, out of arguments that come in pieces."""

    def __init__(self) -> None:
        self._unread = ""
        self._begun = False

    def feed(self, arguments: str) -> str:
        """More of the text."""
        self._unread += arguments
        if not self._begun:
            head = _HEAD.match(self._unread)
            if head is None:
                return ""
            self._begun, self._unread = True, self._unread[head.end() :]
        readable = _READABLE.match(self._unread)
        text = readable.group() if readable is not None else ""
        self._unread = self._unread[len(text) :]
        return str(json.loads(f'"{text}"', strict=False))


@dataclass(slots=True)
class Call:
    """A call of a tool while it is written."""

    index: int
    response_id: str
    number: int
    """Among the calls of the answer."""
    call_id: str
    function: str
    """What the model calls."""
    offer: Offer | None
    """What that is for the client; None: it was not offered."""
    id: str = ""
    parts: list[str] = field(default_factory=list)
    text: InputText = field(default_factory=InputText)

    def __post_init__(self) -> None:
        self.id = new_item_id("ctc" if self._custom else "fc", self.response_id)

    def takes(self, delta: TextDelta | ToolDelta) -> bool:
        """The delta is more of this."""
        return isinstance(delta, ToolDelta) and delta.index == self.number

    def add(self, delta: ToolDelta) -> list[Data]:
        """The event of more arguments or input; none, if there is no more."""
        more = self.text.feed(delta.arguments) if self._custom else delta.arguments
        if not more:
            return []
        self.parts.append(more)
        return [{"type": f"{self._event}.delta", **self._place, "delta": more}]

    def begin(self) -> list[Data]:
        """The event before its first arguments."""
        return [{"type": "response.output_item.added", "output_index": self.index, "item": self.item("in_progress")}]

    def end(self, status: str) -> list[Data]:
        """The events behind its last arguments."""
        return [
            {"type": f"{self._event}.done", **self._place, self._field: "".join(self.parts)},
            {"type": "response.output_item.done", "output_index": self.index, "item": self.item(status)},
        ]

    def item(self, status: str) -> Data:
        """The item as it is now."""
        offer = self.offer
        item: Data = {
            "id": self.id,
            "type": "custom_tool_call" if self._custom else "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.function if offer is None else offer.name,
            self._field: "".join(self.parts),
        }
        return item if offer is None or offer.namespace is None else {**item, "namespace": offer.namespace}

    @property
    def _custom(self) -> bool:
        return self.offer is not None and self.offer.custom

    @property
    def _field(self) -> str:
        return "input" if self._custom else "arguments"

    @property
    def _event(self) -> str:
        return "response.custom_tool_call_input" if self._custom else "response.function_call_arguments"

    @property
    def _place(self) -> Data:
        return {"item_id": self.id, "output_index": self.index}
