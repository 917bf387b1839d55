"""Anthropic's `context_management`: what of a conversation the model shall not see any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field

from services.gateway.protocol.fields.base import RequestModel, unsupported

_EDITS = ("clear_thinking_20251015", "clear_tool_uses_20250919")
_Count = Annotated[int, Field(ge=0, lt=2**31)]


class ThinkingTurns(RequestModel):
    """Number of last turns of the assistant that keep their thinking."""

    type: Literal["thinking_turns"]
    value: int = Field(ge=1, lt=2**31)


class AllThinking(RequestModel):
    """All of them."""

    type: Literal["all"]


class ToolUses(RequestModel):
    """Number of calls with their results."""

    type: Literal["tool_uses"]
    value: _Count


class InputTokens(RequestModel):
    """Number of tokens of the prompt."""

    type: Literal["input_tokens"]
    value: _Count


class ClearThinking(RequestModel):
    """Leaves out the thinking of earlier turns."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | Annotated[ThinkingTurns | AllThinking, Discriminator("type")] | None = None
    """Whose thinking stays; default: that of the last turn which has some."""

    @property
    def kept(self) -> int | None:
        """Turns whose thinking stays; None: all."""
        if self.keep is None:
            return 1
        return self.keep.value if isinstance(self.keep, ThinkingTurns) else None


class ClearToolUses(RequestModel):
    """Leaves out the results of earlier calls, once the conversation is long."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[InputTokens | ToolUses, Discriminator("type")] | None = None
    """What the conversation must have more of; default: 100,000 tokens."""
    keep: ToolUses | None = None
    """The last calls, whose results stay; default: 3."""
    clear_at_least: InputTokens | None = None
    """Nothing is left out where that would save less."""
    exclude_tools: Annotated[list[str], Field(max_length=1024)] | None = None
    """Tools whose results stay."""
    clear_tool_inputs: bool | Annotated[list[str], Field(max_length=1024)] | None = None
    """Leave out what the calls said, too: of all of these tools, or of those named."""


def _known(edit: Any) -> Any:
    kind = edit.get("type") if isinstance(edit, Mapping) else None
    if isinstance(kind, str) and kind not in _EDITS:
        raise unsupported(
            f"context_management edits of type {kind[:80]!r} are not supported: send {' or '.join(_EDITS)}, or leave "
            "out of messages what the model need not see",
            "type",
        )
    return edit


Edit = Annotated[ClearThinking | ClearToolUses, Discriminator("type"), BeforeValidator(_known)]


class ContextManagement(RequestModel):
    """What is left out of the prompt; the client's own conversation stays as it is."""

    edits: Annotated[list[Edit], Field(max_length=16)] | None = None
    """Applied in this order."""
