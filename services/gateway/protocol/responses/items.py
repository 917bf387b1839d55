"""The items of a Responses input: messages, calls of functions, what they answered, and reasoning."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from services.common.validation.errors import contradiction
from services.common.validation.json_rules import Rules, either, has, items
from services.gateway.protocol.fields.base import CacheBreakpoint, CacheControl, JsonObject, RequestModel, unsupported

MAX_ITEMS = 4096
ItemId = Annotated[str, Field(min_length=1, max_length=256)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]

_FOREIGN_PARTS = ("input_image", "input_file", "input_audio", "image_url", "file", "audio")
_ITEMS = (
    *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning"),
    "item_reference",
)
_INSTEAD = {
    "compaction": "send the items themselves",
    "additional_tools": "send tools",
}


def _part_type(value: Any) -> Any:
    if value in _FOREIGN_PARTS:
        raise unsupported(
            f"content parts of type {value!r} are not supported: this model reads text, send input_text parts"
        )
    return value


class InputText(RequestModel):
    """A piece of text that the model reads."""

    type: Annotated[Literal["input_text"], BeforeValidator(_part_type)]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None
    cache_control: CacheControl | None = None


class OutputText(RequestModel):
    """A piece of text that the model wrote, as a response gave it."""

    type: Annotated[Literal["output_text"], BeforeValidator(_part_type)]
    text: str
    annotations: list[JsonObject] | None = None
    """Accepted and ignored."""
    logprobs: list[JsonObject] | None = None
    """Accepted and ignored."""


class Refusal(RequestModel):
    """What a model said instead of an answer."""

    type: Annotated[Literal["refusal"], BeforeValidator(_part_type)]
    refusal: str


Part = InputText | OutputText | Refusal


class MessageItem(RequestModel):
    """A message of a conversation. "developer" is the same as "system"."""

    type: Literal["message"] | None = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Part], Field(min_length=1)]
    id: ItemId | None = None
    status: ItemStatus | None = None
    """Accepted and ignored."""
    phase: Literal["commentary", "final_answer"] | None = None
    """Accepted and ignored."""

    json_rules: ClassVar[Rules] = (
        either(has(role="assistant"), has(content=either({"type": "string"}, items(has(type="input_text"))))),
    )

    @model_validator(mode="after")
    def _who_writes_what(self) -> MessageItem:
        if self.role != "assistant" and not isinstance(self.content, str):
            for position, part in enumerate(self.content):
                if not isinstance(part, InputText):
                    raise contradiction(
                        f"a message of the {self.role} has input_text parts, and this one is {part.type}",
                        f"content[{position}].type",
                    )
        return self

    @property
    def text(self) -> str:
        """All of its text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in self.content)


class DirectCaller(RequestModel):
    """The model itself."""

    type: Literal["direct"]


class _CallItem(RequestModel):
    call_id: ItemId
    name: str = Field(min_length=1, max_length=256)
    namespace: ItemId | None = None
    id: ItemId | None = None
    status: ItemStatus | None = None
    """Accepted and ignored."""
    caller: DirectCaller | None = None
    async_: Literal[False] | None = Field(None, alias="async")
    """Only false: a call is answered in the next request."""


class FunctionCallItem(_CallItem):
    """A call that the model made."""

    type: Literal["function_call"]
    arguments: str
    """A JSON object, as text."""


class CustomCallItem(_CallItem):
    """A call of a custom tool that the model made."""

    type: Literal["custom_tool_call"]
    input: str


class _OutputItem(RequestModel):
    call_id: ItemId
    """Id of the call that it answers."""
    output: str | Annotated[list[InputText], Field(min_length=1)]
    id: ItemId | None = None
    status: ItemStatus | None = None
    """Accepted and ignored."""
    caller: DirectCaller | None = None
    name: ItemId | None = None
    """Accepted and ignored: the call has it."""
    namespace: ItemId | None = None
    """Accepted and ignored: the call has it."""

    @property
    def text(self) -> str:
        """All of its text."""
        return self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)


class FunctionCallOutputItem(_OutputItem):
    """What a function answered."""

    type: Literal["function_call_output"]


class CustomCallOutputItem(_OutputItem):
    """What a custom tool answered."""

    type: Literal["custom_tool_call_output"]


class ItemReference(RequestModel):
    """An item of a stored response, one that it was given or that it answered."""

    type: Literal["item_reference"] | None = None
    id: ItemId


class SummaryText(RequestModel):
    """Reasoning as its summary."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(RequestModel):
    """Reasoning itself."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(RequestModel):
    """What the model thought before a message or a call. Its content counts, or its summary if it has no content."""

    type: Literal["reasoning"]
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    id: ItemId | None = None
    status: ItemStatus | None = None
    """Accepted and ignored."""
    encrypted_content: str | None = None
    """Accepted and ignored: it can be read by who wrote it only."""

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(part.text for part in self.content or self.summary or ())


def _known(item: Any) -> Any:
    kind = item.get("type") if isinstance(item, dict) else None
    if isinstance(kind, str) and kind not in _ITEMS:
        instead = _INSTEAD.get(kind, f"send items of the types {', '.join(_ITEMS)}")
        raise unsupported(f"items of type {kind[:40]!r} are not supported: {instead}")
    return item


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if isinstance(kind, str) and kind in _ITEMS:
        return kind
    refers = item.keys() <= {"id", "type"} if isinstance(item, dict) else isinstance(item, ItemReference)
    return "item_reference" if item and refers and kind is None else "message"


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | CustomCallItem | CustomCallOutputItem | ReasoningItem
"""An item itself."""
InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CustomCallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
    BeforeValidator(_known),
]
