"""The tools of a chat, and which of them the model may or must call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from services.gateway.protocol.fields.base import JsonObject, RequestModel, unsupported
from services.gateway.protocol.fields.caching import CacheControl
from services.gateway.protocol.fields.hosted_tools import HostedTool, is_hosted

TOOL_NAME = r"^[A-Za-z0-9_.-]+$"
MAX_TOOL_NAME = 128
"""Longest name, as at Anthropic; OpenAI has 64. A name of ours may have a namespace before it."""
_FOREIGN_CHOICES = ("custom", "mcp", "hosted", "any", "tool")


class FunctionSpec(RequestModel):
    """A function the model may call."""

    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME, pattern=TOOL_NAME)
    description: str | None = None
    parameters: JsonObject | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """true: calls of this function follow the schema, enforced by masks. Otherwise as far as the model does, except
    where tool_choice forces a call."""
    cache_control: CacheControl | None = None


def _own(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind == "custom":
        raise unsupported(
            "custom tools are not supported in chat completions: offer a function with one text parameter, or send "
            "the request to /v1/responses",
            "type",
        )
    return tool


class Tool(RequestModel):
    """A tool the model may call."""

    type: Literal["function"]
    function: FunctionSpec
    cache_control: CacheControl | None = None


def _kind(tool: Any) -> str:
    return "hosted" if is_hosted(tool) else "function"


OfferedTool = Annotated[
    Annotated[Tool, Tag("function")] | Annotated[HostedTool, Tag("hosted")], Discriminator(_kind), BeforeValidator(_own)
]


class FunctionName(RequestModel):
    """A function by its name."""

    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME)


class NamedTool(RequestModel):
    """A tool by its name; as tool_choice: the answer is a call of it."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(RequestModel):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128)]


class AllowedToolsChoice(RequestModel):
    """The model is shown all tools and may call these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _known(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else value
    if isinstance(kind, str) and kind in _FOREIGN_CHOICES:
        raise unsupported(
            f"tool_choice {kind!r} is not supported: send 'auto', 'none', 'required', "
            '{"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}'
        )
    return value


ToolChoice = Annotated[
    Literal["auto", "none", "required"] | NamedTool | AllowedToolsChoice | None, BeforeValidator(_known)
]
