"""The tools of a response as the functions of a chat, and the model's calls of those back as calls of the tools.

A tool of a namespace is a function whose name has the namespace before it; a custom tool is one with a single text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.api.responses.to_chat.places import Location
from services.gateway.protocol.fields.hosted_tools import HostedTool
from services.gateway.protocol.responses.tools import (
    CustomTool,
    FunctionTool,
    GrammarText,
    NamespaceName,
    NamespaceTool,
    ResponseAllowedTools,
    ToolName,
)

INPUT = "input"
"""The one parameter of a custom tool."""
_BETWEEN = "__"


def qualified(name: str, namespace: str | None) -> str:
    """What the model knows a tool by. Namespaces of MCP servers end with the separator themselves."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith(_BETWEEN) else f"{namespace}{_BETWEEN}{name}"


@dataclass(frozen=True, slots=True)
class Offer:
    """One tool of a response, as a tool of the chat.

    Args:
        tool: in the chat's form.
        source: where it is in the request.
        name: what the client knows it by; empty for a hosted one.
        namespace: of the name.
        custom: its input is a text.
    """

    tool: dict[str, Any]
    source: Location
    name: str = ""
    namespace: str | None = None
    custom: bool = False


class Offers:
    """All tools of a response.

    Args:
        tools: of the request.
    """

    def __init__(self, tools: Sequence[FunctionTool | CustomTool | NamespaceTool | HostedTool] | None) -> None:
        self.all = [offer for index, tool in enumerate(tools or ()) for offer in _offers(tool, ("tools", index))]
        self._by_name = {offer.tool["function"]["name"]: offer for offer in self.all if offer.name}

    def called(self, function: str) -> Offer | None:
        """The tool that the model calls by a name; None: there is none."""
        return self._by_name.get(function)

    def function_of(self, name: str, namespace: str | None) -> str:
        """The function that the client names. Without a namespace it may be in one, where no other has the name."""
        if namespace is not None or name in self._by_name:
            return qualified(name, namespace)
        found = [offer for offer in self._by_name.values() if offer.name == name]
        return qualified(name, found[0].namespace) if len(found) == 1 else name

    def allowed(self, choice: ResponseAllowedTools) -> list[str]:
        """The functions that a choice allows; what is hosted is left out."""
        names: list[str] = []
        for tool in choice.tools:
            if isinstance(tool, ToolName):
                names.append(self.function_of(tool.name, tool.namespace))
            elif isinstance(tool, NamespaceName):
                of_it = [name for name, offer in self._by_name.items() if offer.namespace == tool.name]
                names += of_it or [tool.name]
        return list(dict.fromkeys(names))


def _offers(tool: FunctionTool | CustomTool | NamespaceTool | HostedTool, source: Location) -> Iterator[Offer]:
    if isinstance(tool, HostedTool):
        yield Offer({"type": tool.type}, source)
    elif isinstance(tool, NamespaceTool):
        for index, member in enumerate(tool.tools):
            about = tool.description if index == 0 else None
            yield _offer(member, (*source, "tools", index), tool.name, about)
    else:
        yield _offer(tool, source)


def _offer(
    tool: FunctionTool | CustomTool, source: Location, namespace: str | None = None, about: str | None = None
) -> Offer:
    function: dict[str, Any] = {"name": qualified(tool.name, namespace)}
    described = [f"{namespace}: {about}" if about else None, tool.description]
    if isinstance(tool, CustomTool):
        function |= {"parameters": _one_text(tool), "strict": True}
    else:
        function |= {"parameters": tool.parameters, "strict": tool.strict}
    function["description"] = "\n\n".join(filter(None, described)) or None
    given = {field: value for field, value in function.items() if value is not None}
    return Offer({"type": "function", "function": given}, source, tool.name, namespace, isinstance(tool, CustomTool))


def _one_text(tool: CustomTool) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "string"}
    if isinstance(tool.format, GrammarText):
        if tool.format.syntax == "regex":
            text["pattern"] = f"^(?:{tool.format.definition})$"
        else:
            text["description"] = f"In the language of this Lark grammar:\n{tool.format.definition}"
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
