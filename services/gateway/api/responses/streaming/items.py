"""The output items of a response as they grow: what each delta adds, and the events that tell it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.text.output_parser import TextDelta
from services.gateway.text.tool_calls.parser import ToolDelta

Data = dict[str, Any]


def new_id(kind: str) -> str:
    """An id as OpenAI makes them: "resp_" and hex digits."""
    return f"{kind}_{uuid.uuid4().hex}"


def new_item_id(kind: str, response_id: str) -> str:
    """The id of an item that a response was given or answers: it says in which response the item is found again."""
    return f"{kind}_{response_id.removeprefix('resp_')}{uuid.uuid4().hex[:16]}"


@dataclass(slots=True)
class Text:
    """A message, or reasoning, while it is written."""

    index: int
    response_id: str
    reasoning: bool
    summarised: bool = False
    id: str = ""
    parts: list[str] = field(default_factory=list)
    logprobs: list[Data] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = new_item_id("rs" if self.reasoning else "msg", self.response_id)

    def takes(self, delta: TextDelta | ToolDelta) -> bool:
        """The delta is more of this."""
        return isinstance(delta, TextDelta) and delta.reasoning == self.reasoning

    def add(self, delta: TextDelta, logprobs: Sequence[Data]) -> Data:
        """The event of more text."""
        self.parts.append(delta.text)
        self.logprobs += logprobs
        more: Data = {} if self.reasoning else {"logprobs": list(logprobs)}
        return {"type": f"{self._event}.delta", **self._place, "delta": delta.text, **more}

    def begin(self) -> list[Data]:
        """The events before its first text."""
        part = self._part("", [])
        return [
            {
                "type": "response.output_item.added",
                "output_index": self.index,
                "item": self.item("in_progress", fresh=True),
            },
            {"type": f"response.{self._part_name}.added", **self._place, "part": part},
        ]

    def end(self, status: str) -> list[Data]:
        """The events behind its last text."""
        text = "".join(self.parts)
        more: Data = {} if self.reasoning else {"logprobs": self.logprobs}
        return [
            {"type": f"{self._event}.done", **self._place, "text": text, **more},
            {"type": f"response.{self._part_name}.done", **self._place, "part": self._part(text, self.logprobs)},
            {"type": "response.output_item.done", "output_index": self.index, "item": self.item(status)},
        ]

    def item(self, status: str, *, fresh: bool = False) -> Data:
        """The item as it is now; ``fresh``: as it was before its first text."""
        parts = [] if fresh else [self._part("".join(self.parts), self.logprobs)]
        if not self.reasoning:
            return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": parts}
        told = {"summary": parts, "content": []} if self.summarised else {"summary": [], "content": parts}
        return {"id": self.id, "type": "reasoning", "status": status, **told}

    @property
    def _event(self) -> str:
        if not self.reasoning:
            return "response.output_text"
        return "response.reasoning_summary_text" if self.summarised else "response.reasoning_text"

    @property
    def _part_name(self) -> str:
        return "reasoning_summary_part" if self.summarised else "content_part"

    @property
    def _place(self) -> Data:
        counted = "summary_index" if self.summarised else "content_index"
        return {"item_id": self.id, "output_index": self.index, counted: 0}

    def _part(self, text: str, logprobs: list[Data]) -> Data:
        if self.reasoning:
            return {"type": "summary_text" if self.summarised else "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
