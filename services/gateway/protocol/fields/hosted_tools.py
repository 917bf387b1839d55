"""Tools that OpenAI and Anthropic run themselves, or whose form only their models know.

Nothing of them can be had here. Beside functions they are left out, and the answer says so; alone, or forced, they are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from services.common.validation.json_rules import Rule, contains, has, never
from services.gateway.protocol.fields.base import RequestModel, contradiction, unsupported

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
    """Whether a tool of a request, read or not, is one of these."""
    kind = tool.get("type") if isinstance(tool, Mapping) else getattr(tool, "type", None)
    return isinstance(kind, str) and _HOSTED.match(kind) is not None


NOT_ALONE: Rule = contains(never(has(type={"type": "string", "pattern": _PATTERN})))
"""A list of tools has one that can be offered."""


def check_hosted(tools: Sequence[Any], forced: str | None = None) -> None:
    """Refuses them where nothing else is offered, or where one is forced.

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
    """What is left out of a request's tools, each type once."""
    return list(dict.fromkeys(tool.type for tool in tools or () if isinstance(tool, HostedTool)))
