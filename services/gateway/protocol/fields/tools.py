"""Tools of a chat, which of them the model may or must call, and the tools that other providers run themselves.

Of those that OpenAI and Anthropic run, or whose form only their models know, nothing can be had here. Beside functions
they are left out, and the answer says so; alone, or forced, they are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from services.common.validation.errors import contradiction
from services.common.validation.json_rules import Rule, contains, has, never
from services.gateway.protocol.fields.base import CacheControl, JsonObject, RequestModel, unsupported

_OPENAI = (
    r"web_search(_preview)?(_\d{4}_\d{2}_\d{2})?",
    r"computer(_use)?(_preview)?",
    *("file_search", "code_interpreter", "image_generation", "mcp", "local_shell", "shell", "apply_patch"),
    *("tool_search", "programmatic_tool_calling"),
)
_ANTHROPIC = (
    r"(bash|text_editor|computer|memory|code_execution|web_search|web_fetch|advisor)_\d{8}",
    r"tool_search_tool_(bm25|regex)(_\d{8})?",
    r"(browser|computer)_toolset(_\d{8})?",
    "mcp_toolset",
)
_PATTERN = f"^({'|'.join((*_OPENAI, *_ANTHROPIC))})$"
_HOSTED = re.compile(_PATTERN)


class HostedTool(RequestModel):
    """A tool that another provider's API runs, such as web_search. It is left out, which the answer says."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[str, Field(pattern=_PATTERN)]
    name: str | None = None


def is_hosted(tool: Any) -> bool:
    """True if a tool of a request, parsed or not, is one that another provider runs."""
    kind = tool.get("type") if isinstance(tool, Mapping) else getattr(tool, "type", None)
    return isinstance(kind, str) and _HOSTED.match(kind) is not None


NOT_ALONE: Rule = contains(never(has(type={"type": "string", "pattern": _PATTERN})))
"""A list of tools has one that can be offered."""


def check_hosted(tools: Sequence[Any], forced: str | None = None) -> None:
    """Refuses hosted tools where nothing else is offered, or where one is forced.

    Args:
        tools: of the request.
        forced: the name in tool_choice.
    """
    hosted = [(index, tool) for index, tool in enumerate(tools) if isinstance(tool, HostedTool)]
    if hosted and len(hosted) == len(tools):
        index, tool = hosted[0]
        raise unsupported(
            f"tools[{index}]: tools of type {tool.type!r} are not supported: nothing is run here, offer a function of "
            "your own and answer its calls",
            f"tools[{index}].type",
        )
    for _, tool in hosted:
        if forced is not None and forced in (tool.name, tool.type):
            raise contradiction(
                f"tool_choice names {forced!r}, a tool of type {tool.type!r}: nothing is run here, name a function of "
                "your own",
                "tool_choice",
            )


def types_of_hosted(tools: Sequence[Any] | None) -> list[str]:
    """Types of a request's tools that are left out, each once."""
    return list(dict.fromkeys(tool.type for tool in tools or () if isinstance(tool, HostedTool)))


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
    return_: JsonObject | None = Field(None, alias="return")
    """JSON schema of what it returns, as transformers' get_json_schema writes it; the chat template shows it."""
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
