"""The answer of /v1/messages as content blocks: the same events make a stream and the message in one piece."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from services.gateway.inference.choice import Choice
from services.gateway.text.output_parser import Delta, TextDelta
from services.gateway.text.tool_calls.parser import ToolDelta

_CALL, _TOOL_USE = "call_", "toolu_"

BlockEvent = dict[str, Any]


class MessageBlocks:
    """Splits the deltas of one choice into blocks.

    Args:
        show_thinking: thinking blocks have their text; otherwise they are empty.
    """

    def __init__(self, *, show_thinking: bool = True) -> None:
        self._show_thinking = show_thinking
        self._open: str | None = None
        """Kind of the block that may grow: "text", "thinking", or the id of a call."""
        self._index = -1
        self._thought = hashlib.sha256()

    @property
    def index(self) -> int:
        """Number of the block that was begun last."""
        return self._index

    def continues(self, delta: TextDelta) -> bool:
        """Whether a delta is nothing but more text of the open block."""
        return self._open == "text" and not delta.reasoning

    def take(self, delta: Delta) -> list[BlockEvent]:
        """The events of one delta."""
        if isinstance(delta, ToolDelta):
            return self._take_call(delta)
        if delta.reasoning:
            self._thought.update(delta.text.encode())
            events = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return [*events, *self._more("thinking", delta.text)] if self._show_thinking else events
        return [*self._begin("text", {"type": "text", "text": ""}), *self._more("text", delta.text)]

    def close(self) -> list[BlockEvent]:
        """The end of the open block, if one is."""
        if self._open is None:
            return []
        events = [{"type": "content_block_stop", "index": self._index}]
        if self._open == "thinking":
            # Clients drop thinking that is not signed.
            delta = {"type": "signature_delta", "signature": self._thought.hexdigest()}
            events.insert(0, {"type": "content_block_delta", "index": self._index, "delta": delta})
            self._thought = hashlib.sha256()
        self._open = None
        return events

    def _take_call(self, delta: ToolDelta) -> list[BlockEvent]:
        events = []
        if delta.name is not None and delta.call_id is not None:
            call_id = _TOOL_USE + delta.call_id.removeprefix(_CALL)
            events = self._begin(call_id, {"type": "tool_use", "id": call_id, "name": delta.name, "input": {}})
        return [*events, *self._more("input_json", delta.arguments)] if delta.arguments else events

    def _begin(self, kind: str, block: dict[str, Any]) -> list[BlockEvent]:
        if self._open == kind:
            return []
        events = self.close()
        self._open = kind
        self._index += 1
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _more(self, kind: str, text: str) -> list[BlockEvent]:
        field = "partial_json" if kind == "input_json" else kind
        delta = {"type": f"{kind}_delta", field: text}
        return [{"type": "content_block_delta", "index": self._index, "delta": delta}]


def joined(events: Sequence[BlockEvent]) -> list[dict[str, Any]]:
    """The blocks that events of a whole answer make."""
    blocks: list[dict[str, Any]] = []
    pieces: list[list[str]] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
                pieces.append([])
            case "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "signature_delta":
                    blocks[-1]["signature"] = delta["signature"]
                else:
                    pieces[-1].append(delta[next(field for field in delta if field != "type")])
    for block, texts in zip(blocks, pieces, strict=True):
        text = "".join(texts)
        if block["type"] != "tool_use":
            block[block["type"]] = text
        elif text:
            block["input"] = _input(text)
    return blocks


def _input(text: str) -> dict[str, Any]:
    """Arguments as an object; of a call that max_tokens or a stop cut off the values that are complete, as
    anthropic-python reads the stream."""
    try:
        parsed: dict[str, Any] = from_json(text, allow_partial=True)
    except ValueError:
        # Nested deeper than a parser of JSON goes, so it would not be read as an object by clients either.
        parsed = {"arguments": text}
    return parsed


def stop_of(choice: Choice, finish_reason: str, *, clipped: bool) -> dict[str, str | None]:
    """`stop_reason` and `stop_sequence`.

    Args:
        choice: it is finished.
        finish_reason: OpenAI's.
        clipped: its tokens were limited by the context, not by max_tokens.
    """
    if finish_reason == "length":
        return {"stop_reason": "model_context_window_exceeded" if clipped else "max_tokens", "stop_sequence": None}
    if finish_reason == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    found = choice.stopped_by
    return {"stop_reason": "end_turn" if found is None else "stop_sequence", "stop_sequence": found}


def message_usage(choice: Choice) -> dict[str, Any]:
    """Token counts so far, and where the client's session is."""
    counts: dict[str, Any] = {
        "input_tokens": choice.prompt_tokens - choice.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": choice.cached_tokens,
        "output_tokens": choice.tokens,
        "output_tokens_details": {"thinking_tokens": choice.reasoning_tokens},
    }
    return counts if choice.session is None else counts | {"session": choice.session}
