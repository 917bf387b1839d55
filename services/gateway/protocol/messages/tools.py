"""The tools of a message, and which of them the model may or must call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from services.gateway.protocol.fields.base import CacheControl, JsonObject, RequestModel, unsupported
from services.gateway.protocol.fields.tools import MAX_TOOL_NAME, TOOL_NAME, HostedTool, is_hosted


def _own(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "custom" and not is_hosted(tool):
        raise unsupported(
            f"tools of type {kind[:80]!r} are not supported: send a tool of your own, with name, description and "
            "input_schema",
            "type",
        )
    return tool


def _model_only(callers: list[str] | None) -> list[str] | None:
    if callers is not None and "direct" not in callers:
        raise unsupported("allowed_callers without 'direct' are not supported: a tool is called by the model")
    return callers


_WITH_DIRECT = {
    "anyOf": [{"type": "array", "items": {"type": "string"}, "contains": {"const": "direct"}}, {"type": "null"}]
}


DirectCallers = Annotated[list[str] | None, AfterValidator(_model_only), WithJsonSchema(_WITH_DIRECT)]


class ClientTool(RequestModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME, pattern=TOOL_NAME)
    description: str | None = None
    input_schema: JsonObject
    """JSON schema of its input."""
    cache_control: CacheControl | None = None
    strict: bool | None = None
    """Same as in the chat's tools."""
    eager_input_streaming: bool | None = None
    """Accepted and ignored: an input is streamed as far as it is certain."""
    allowed_callers: DirectCallers = None
    """"direct" is among them."""
    defer_loading: bool | None = None
    """Accepted and ignored: the model is shown every tool from the start."""
    input_examples: Annotated[list[JsonObject], Field(max_length=64)] | None = None
    """The model reads them behind the description."""


def _kind(tool: Any) -> str:
    return "hosted" if is_hosted(tool) else "client"


OfferedTool = Annotated[
    Annotated[ClientTool, Tag("client")] | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_kind),
    BeforeValidator(_own),
]


class AutoChoice(RequestModel):
    """The model decides."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None
    """true: the answer ends with its first call."""


class AnyChoice(RequestModel):
    """The model must call a tool."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(RequestModel):
    """The model must call this tool."""

    type: Literal["tool"]
    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME)
    disable_parallel_tool_use: bool | None = None


class NoChoice(RequestModel):
    """The model is not shown the tools."""

    type: Literal["none"]


ToolChoice = Annotated[AutoChoice | AnyChoice | NamedChoice | NoChoice, Discriminator("type")]
