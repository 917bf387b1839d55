"""POST /v1/messages and /v1/messages/count_tokens: what Anthropic's clients send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, model_validator

from services.common.validation.errors import contradiction
from services.common.validation.json_rules import (
    NULL,
    SOME,
    Rules,
    either,
    has,
    if_any,
    left_out,
    only,
    only_with,
    where,
)
from services.gateway.protocol.fields.adapters import ModelFields
from services.gateway.protocol.fields.base import CacheControl, JsonObject, RequestModel, unsupported
from services.gateway.protocol.fields.sampling import MAX_STOP_STRINGS, StopString
from services.gateway.protocol.fields.tools import NOT_ALONE, check_hosted
from services.gateway.protocol.messages.context_edits import ContextManagement
from services.gateway.protocol.messages.tools import (
    AnyChoice,
    AutoChoice,
    ClientTool,
    NamedChoice,
    OfferedTool,
    ToolChoice,
)

MAX_MESSAGES = 4096
MAX_TOOLS = 128
_READABLE = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


# -- blocks


def _readable(block: Any) -> Any:
    """Refuses what is a block of Anthropic's API, but nothing this model reads."""
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and kind not in _READABLE:
        raise unsupported(
            f"content blocks of type {kind[:80]!r} are not supported: this model reads text, send text blocks", "type"
        )
    return block


def _no_citations(citations: list[JsonObject] | None) -> list[JsonObject] | None:
    if citations:
        raise unsupported("citations are not supported: put what is cited into the text")
    return citations


class TextBlock(RequestModel):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[JsonObject] | None, AfterValidator(_no_citations), only([], None)] = None
    """Only null or empty."""


class ThinkingBlock(RequestModel):
    """The thinking of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    """Accepted and not checked: thinking may be sent by whoever wrote it."""


class RedactedThinkingBlock(RequestModel):
    """Thinking that another provider encrypted. Nobody here can read it, so the prompt goes without it."""

    type: Literal["redacted_thinking"]
    data: str


def _direct(caller: dict[str, Any] | None) -> dict[str, Any] | None:
    if caller not in (None, {"type": "direct"}):
        raise unsupported("a caller other than the model is not supported: leave it out")
    return caller


def _no_toolset(name: str | None) -> str | None:
    if name is not None:
        raise unsupported("toolsets are not supported: leave toolset_name out and send tools of your own")
    return name


Caller = Annotated[JsonObject | None, AfterValidator(_direct), only({"type": "direct"}, None)]
Toolset = Annotated[str | None, AfterValidator(_no_toolset), only(None)]


class ToolUseBlock(RequestModel):
    """A call in an assistant's turn."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: JsonObject
    cache_control: CacheControl | None = None
    caller: Caller = None
    """Only {"type": "direct"}."""
    toolset_name: Toolset = None
    """Only null."""


# fail_fast: one error is told, and the errors of a million blocks would fill the memory.
Texts = Annotated[list[Annotated[TextBlock, BeforeValidator(_readable)]], Field(fail_fast=True)]


class ToolResultBlock(RequestModel):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: str | Texts | None = None
    is_error: bool | None = None
    """true: the model reads the content with "Error: " before it."""
    cache_control: CacheControl | None = None
    toolset_name: Toolset = None
    """Only null."""


UserBlock = Annotated[TextBlock | ToolResultBlock, Discriminator("type"), BeforeValidator(_readable)]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Discriminator("type"), BeforeValidator(_readable)
]


# -- messages


class UserTurn(RequestModel):
    """What the user says, after the results of the tools that the model called."""

    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(min_length=1, fail_fast=True)]


class AssistantTurn(RequestModel):
    """What the model said before. As the last message it is the beginning of the answer."""

    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], Field(fail_fast=True)]


class SystemTurn(RequestModel):
    """Instructions, wherever they stand: behind the beginning they are a marked part of the turn that they stand in."""

    role: Literal["system"]
    content: str | Texts


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Discriminator("role")]


# -- what else changes the prompt or the answer

Display = Literal["summarized", "omitted"]


class ThinkingOn(RequestModel):
    """Think before the answer."""

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1, lt=2**31)
    """Tokens of thinking; must be less than max_tokens."""
    display: Display | None = None
    """"omitted": the answer's thinking blocks are empty. Otherwise they have the whole text, never a summary."""


class ThinkingAdaptive(RequestModel):
    """Think as long as the model wants."""

    type: Literal["adaptive"]
    display: Display | None = None


class ThinkingOff(RequestModel):
    """Answer at once."""

    type: Literal["disabled"]


def _known_thinking(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "between_tools":
        raise unsupported("thinking 'between_tools' is not supported: send enabled, adaptive or disabled", "type")
    return value


Thinking = Annotated[
    ThinkingOn | ThinkingAdaptive | ThinkingOff, Discriminator("type"), BeforeValidator(_known_thinking)
]


class JsonFormat(RequestModel):
    """The text is JSON of a schema."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(RequestModel):
    """What the answer should look like."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """How much an adaptive thinking may use. Accepted without effect where thinking is not adaptive."""
    format: JsonFormat | None = None
    task_budget: JsonObject | None = None
    """Accepted and ignored: the model is not told of it."""


class Diagnostics(RequestModel):
    """Accepted and ignored: usage says how much of the prompt was cached."""

    previous_message_id: str | None = Field(None, max_length=256)


class Metadata(RequestModel):
    """About the request."""

    user_id: str | None = None
    """What `user` is in a chat: requests of one belong to a session whose cached state is kept."""


def _standard(value: str | None) -> str | None:
    if value == "fast":
        raise unsupported("speed 'fast' is not supported: there is one speed, leave it out or send 'standard'")
    return value


def _no_thread(thread: dict[str, Any] | None) -> dict[str, Any] | None:
    if thread is not None:
        # By this code anthropic-python's tool runner knows to go on without a thread.
        raise unsupported(
            "thread is not supported: send the whole conversation in messages", code="thread_unsupported_request"
        )
    return thread


_ELSEWHERE: Mapping[str, str] = {
    "container": "this server runs no code",
    "mcp_servers": "connect to them yourself and send their tools",
    "compaction": "leave out of messages what the model need not see, as context_management does",
    "fallback_credit_token": "leave it out, nothing is billed",
    "billing_policy": "leave it out, nothing is billed",
}


class ConversationFields(ModelFields):
    """Fields of the prompt, which are all that counting its tokens needs. null is the same as leaving out."""

    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    """Consecutive turns of one role are one turn."""
    system: str | Texts | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    """Thinking; disabled where it is left out."""
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    """Older name of output_config.format."""
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    betas: Annotated[list[str], Field(max_length=64)] | None = None
    """Accepted and ignored, as the header anthropic-beta is: what is here needs none."""
    speed: Annotated[Literal["standard", "fast"] | None, AfterValidator(_standard), only("standard", None)] = None
    """Only "standard"."""
    thread: Annotated[JsonObject | None, AfterValidator(_no_thread), only(None)] = None
    """Only null."""

    refused: ClassVar[Mapping[str, str]] = _ELSEWHERE
    json_rules: ClassVar[Rules] = (
        where(has(tool_choice=has(type={"not": {"const": "none"}})), has(tools=SOME)),
        where(has(tools=SOME), has(tools=NOT_ALONE)),
        only_with("output_format", if_any(output_config=either(NULL, left_out("format")))),
    )

    @property
    def format(self) -> JsonFormat | None:
        """The form of the answer's text."""
        return self.output_format if self.output_config is None else self.output_config.format or self.output_format

    @model_validator(mode="after")
    def _named_tools(self) -> ConversationFields:
        names = [tool.name for tool in self.tools or () if isinstance(tool, ClientTool)]
        check_hosted(self.tools or (), self.tool_choice.name if isinstance(self.tool_choice, NamedChoice) else None)
        if len(set(names)) < len(names):
            raise contradiction("two tools have the same name", "tools")
        if isinstance(self.tool_choice, AutoChoice | AnyChoice | NamedChoice) and not names:
            raise contradiction("tool_choice is only allowed together with tools", "tool_choice")
        if isinstance(self.tool_choice, NamedChoice) and self.tool_choice.name not in names:
            raise contradiction(
                f"tool_choice names {self.tool_choice.name!r}, which is not in tools", "tool_choice.name"
            )
        return self

    @model_validator(mode="after")
    def _one_format(self) -> ConversationFields:
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise contradiction(
                "output_format is the older name of output_config.format: send one of them", "output_format"
            )
        return self

    @model_validator(mode="after")
    def _prefilled(self) -> ConversationFields:
        if isinstance(self.messages[-1], AssistantTurn) and isinstance(self.thinking, ThinkingOn | ThinkingAdaptive):
            raise contradiction(
                "an answer whose beginning is given cannot be thought about first: end messages with the user's turn, "
                "or disable thinking",
                "thinking",
            )
        return self


class CountTokensRequest(ConversationFields):
    """How many tokens a prompt has."""


class MessagesRequest(ConversationFields):
    """Anthropic's message."""

    max_tokens: int = Field(ge=1, lt=2**31)
    """The answer's tokens, thinking included. More than the context leaves is no error: the answer then ends where
    the context does, with the stop_reason "model_context_window_exceeded"."""
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    """Up to four strings that end the answer and are not part of it."""
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    """0 is greedy; default 1."""
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    """0: off."""
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """There is one tier."""
    inference_geo: str | None = Field(None, max_length=64)
    """Accepted and ignored: the answer is computed where this server runs."""
    diagnostics: Diagnostics | None = None
    fallbacks: Literal["default"] | Annotated[list[JsonObject], Field(max_length=16)] | None = None
    """Accepted and ignored: nothing is declined for a policy, which is when another model would be asked."""

    @model_validator(mode="after")
    def _budget(self) -> MessagesRequest:
        if isinstance(self.thinking, ThinkingOn) and self.thinking.budget_tokens >= self.max_tokens:
            raise contradiction(
                f"thinking.budget_tokens is {self.thinking.budget_tokens} and max_tokens {self.max_tokens}: the budget "
                "must be smaller, thinking counts towards max_tokens",
                "thinking.budget_tokens",
            )
        return self
