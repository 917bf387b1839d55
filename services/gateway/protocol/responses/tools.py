"""The tools of a response, and which of them the model may or must call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from services.common.validation.json_rules import Rules, has
from services.gateway.protocol.fields.base import JsonObject, RequestModel, unsupported
from services.gateway.protocol.fields.tools import (
    MAX_TOOL_NAME,
    NOT_ALONE,
    TOOL_NAME,
    HostedTool,
    check_hosted,
    is_hosted,
)
from services.gateway.protocol.messages.tools import DirectCallers

_OURS = ("function", "custom", "namespace")
_Name = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME)]
_OwnName = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME, pattern=TOOL_NAME)]


class _Offer(RequestModel):
    name: _OwnName
    description: str | None = None
    allowed_callers: DirectCallers = None
    """"direct" is among them."""
    defer_loading: bool | None = None
    """Accepted and ignored: the model is shown every tool from the start."""
    async_: Literal[False] | None = Field(None, alias="async")
    """Only false: a call is answered in the next request."""


class FunctionTool(_Offer):
    """A function that the model may call, and the client runs."""

    type: Literal["function"]
    parameters: JsonObject | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Same as in chat completions; null: false."""
    output_schema: JsonObject | None = None
    """Accepted and ignored: describe what the function returns in its description."""


class AnyText(RequestModel):
    """Any text."""

    type: Literal["text"]


class GrammarText(RequestModel):
    """A text of a language."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    """"regex" is enforced; "lark" is shown to the model and not enforced: it could allow what ends a call."""
    definition: str = Field(min_length=1)


class CustomTool(_Offer):
    """A tool whose input is a text, not JSON."""

    type: Literal["custom"]
    format: Annotated[AnyText | GrammarText, Discriminator("type")] | None = None
    """What its input may be; default: any text."""


class NamespaceTool(RequestModel):
    """Functions and custom tools that belong together. The model knows them as "namespace__name"."""

    type: Literal["namespace"]
    name: _OwnName
    description: str | None = None
    """The model reads it before the description of the first."""
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, Discriminator("type")]], Field(min_length=1, max_length=128)
    ]


def _known(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if isinstance(kind, str) and kind not in _OURS and not is_hosted(tool):
        raise unsupported(
            f"tools of type {kind[:40]!r} are not supported: nothing is run here, offer a function of your own and "
            "answer its calls",
            "type",
        )
    return tool


def _kind(tool: Any) -> str:
    if is_hosted(tool):
        return "hosted"
    kind = tool.get("type") if isinstance(tool, Mapping) else getattr(tool, "type", None)
    return kind if isinstance(kind, str) and kind in _OURS else "function"


OfferedTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_kind),
    BeforeValidator(_known),
]


class ToolName(RequestModel):
    """A function or a custom tool by its name."""

    type: Literal["function", "custom"]
    name: _Name
    namespace: _Name | None = None
    """Namespace of the tool, where it is in one; may be left out where no other has the name."""


class NamespaceName(RequestModel):
    """All tools of a namespace."""

    type: Literal["namespace"]
    name: _Name


def _name_kind(tool: Any) -> str:
    kind = _kind(tool)
    return "tool" if kind in ("function", "custom") else kind


class ResponseAllowedTools(RequestModel):
    """Only some of the tools may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[
                Annotated[ToolName, Tag("tool")]
                | Annotated[NamespaceName, Tag("namespace")]
                | Annotated[HostedTool, Tag("hosted")],
                Discriminator(_name_kind),
                BeforeValidator(_known),
            ]
        ],
        Field(min_length=1, max_length=128),
    ]

    json_rules: ClassVar[Rules] = (has(tools=NOT_ALONE),)

    @model_validator(mode="after")
    def _something_is_ours(self) -> ResponseAllowedTools:
        check_hosted(self.tools)
        return self


def _known_choice(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(kind, str) and kind not in ("function", "custom", "allowed_tools"):
        raise unsupported(
            f"tool_choice of type {kind[:40]!r} is not supported: send 'auto', 'none', 'required', "
            '{"type": "function", "name"}, {"type": "custom", "name"} or {"type": "allowed_tools", "mode", "tools"}'
        )
    return value


def _choice_kind(choice: Any) -> str:
    kind = choice.get("type") if isinstance(choice, Mapping) else getattr(choice, "type", None)
    return "allowed_tools" if kind == "allowed_tools" else "tool"


_Choice = Annotated[
    Annotated[ToolName, Tag("tool")] | Annotated[ResponseAllowedTools, Tag("allowed_tools")],
    Discriminator(_choice_kind),
]
ToolChoice = Annotated[Literal["none", "auto", "required"] | _Choice | None, BeforeValidator(_known_choice)]
