"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, model_validator

from services.common.validation.errors import contradiction
from services.common.validation.json_rules import (
    SOME,
    Rules,
    both,
    either,
    given,
    has,
    if_any,
    only,
    only_with,
    true_only_with,
    where,
)
from services.gateway.protocol.fields.base import (
    CacheBreakpoint,
    CacheControl,
    CacheOptions,
    JsonObject,
    RequestModel,
    unsupported,
)
from services.gateway.protocol.fields.sampling import (
    MAX_TOP_LOGPROBS,
    ReasoningFields,
    SamplingFields,
    ServiceTier,
    Verbosity,
)
from services.gateway.protocol.fields.structured_outputs import OPEN, SCHEMA_AT_MOST
from services.gateway.protocol.fields.tools import (
    NOT_ALONE,
    AllowedToolsChoice,
    FunctionSpec,
    HostedTool,
    NamedTool,
    OfferedTool,
    Tool,
    ToolChoice,
    check_hosted,
    types_of_hosted,
)

_FOREIGN_PARTS = ("image_url", "input_audio", "file", "image", "video", "video_url", "audio", "refusal")


def _text_part(value: Any) -> Any:
    if value in _FOREIGN_PARTS:
        raise unsupported(f"content parts of type {value!r} are not supported: this model reads text, send text parts")
    return value


class TextPart(RequestModel):
    """A piece of a message's text."""

    type: Annotated[Literal["text"], BeforeValidator(_text_part)]
    text: str
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


# fail_fast: one error is told, and the errors of a million parts would fill the memory.
Content = str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]


class CalledFunction(RequestModel):
    """What an assistant called."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str = "{}"
    """A JSON object, as text."""


class ToolCall(RequestModel):
    """A call in an assistant's turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Accepted and ignored: streamed deltas carry it."""
    cache_control: CacheControl | None = None


class _Said(RequestModel):
    name: str | None = None
    cache_control: CacheControl | None = None


class SystemMessage(_Said):
    """Instructions. "developer" is the same as "system". Several at the beginning are one; a later one is a marked part
    of the turn that it stands in."""

    role: Literal["system", "developer"]
    content: Content


class UserMessage(_Said):
    """What the user says."""

    role: Literal["user"]
    content: Content


class AssistantMessage(_Said):
    """What the model said before."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    """The thinking before the content, as a response gave it."""
    reasoning: str | None = None
    """Other name of reasoning_content."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    refusal: str | None = None
    """Accepted and ignored."""
    annotations: list[JsonObject] | None = None
    """Accepted and ignored: openai-python's messages carry it."""

    refused: ClassVar[Mapping[str, str]] = {
        "function_call": "use tool_calls, its successor",
        "audio": "this model reads text",
    }
    json_rules: ClassVar[Rules] = (
        either(given("content"), has(tool_calls=SOME), given("reasoning_content"), given("reasoning")),
    )

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls and self.reasoning_content is None and self.reasoning is None:
            raise contradiction("an assistant message needs content or tool_calls", "content")
        return self


class ToolMessage(_Said):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Discriminator("role")]


def _modalities(value: Any) -> Any:
    if value not in (None, ["text"]):
        raise unsupported("modalities other than ['text'] are not supported: this model writes text")
    return value


_MetadataKey = Annotated[str, Field(max_length=64)]
_MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=16)]


TOOL_CHOICE_NEEDS_TOOLS = where(has(tool_choice={"not": {"enum": ["none", None]}}), has(tools=SOME))
NOT_ONLY_HOSTED = where(has(tools=SOME), has(tools=NOT_ALONE))
_FORCED = either(
    {"const": "required"}, has(type="function"), has(type="allowed_tools", allowed_tools=has(mode="required"))
)
CONTINUES_OR_BEGINS = true_only_with("continue_final_message", if_any(add_generation_prompt={"enum": [False, None]}))


class ChatRequest(ReasoningFields, SamplingFields):
    """OpenAI's chat completion, with the fields of open models and of reinforcement learning."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    """Newer name of max_tokens. Without either: as much as fits, up to the gateway's setting."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[OfferedTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice = None
    """"auto": the model decides; "none": it is not shown the tools; "required": it calls at least one;
    {"type": "function", "function": {"name"}}: it calls this one; {"type": "allowed_tools", ...}: one of some."""
    parallel_tool_calls: bool | None = None
    """false: the answer ends with its first tool call."""
    add_generation_prompt: bool | None = None
    """false: nothing is put after the last message. Default true, or false with continue_final_message."""
    continue_final_message: bool | None = None
    """true: the last message, an assistant's, is left open and the answer goes on where it ends."""
    modalities: Annotated[list[str] | None, BeforeValidator(_modalities), only(["text"], None)] = None
    """Only ["text"]."""
    metadata: Metadata | None = None
    """Up to 16 pairs, keys of 64 and values of 512 characters; returned in the answer."""
    store: bool | None = None
    """Keep the completion for GET /v1/chat/completions/{id}; default false."""
    service_tier: ServiceTier = None
    """Accepted and ignored: there is one tier."""
    safety_identifier: str | None = None
    """Accepted and ignored."""
    prompt_cache_retention: str | None = None
    """Accepted and ignored."""
    prompt_cache_options: CacheOptions | None = None
    cache_control: CacheControl | None = None
    verbosity: Verbosity | None = None
    """Accepted and ignored: ask for the length you want in the prompt."""

    refused: ClassVar[Mapping[str, str]] = {
        "audio": "this model writes text",
        "function_call": "use tool_choice, its successor",
        "functions": "use tools, its successor",
        "prediction": "leave it out, the answer is the same",
        "web_search_options": "offer a search function in tools",
        "moderation": "check texts before you send them",
    }
    json_rules: ClassVar[Rules] = (
        only_with("top_logprobs", has(logprobs=True)),
        TOOL_CHOICE_NEEDS_TOOLS,
        NOT_ONLY_HOSTED,
        CONTINUES_OR_BEGINS,
        # Held by constraints.check_chat.
        where(has(tool_choice=_FORCED), OPEN),
        where(both(has(tools=SOME), if_any(tool_choice={"not": {"const": "none"}})), SCHEMA_AT_MOST),
    )

    @property
    def token_limit(self) -> int | None:
        """The limit asked for, if any."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def usable_tools(self) -> list[tuple[int, Tool]]:
        """The tools that the model is shown, each with its place among all; none under tool_choice "none"."""
        tools = () if self.tool_choice == "none" else self.tools or ()
        return [(index, tool) for index, tool in enumerate(tools) if isinstance(tool, Tool)]

    @property
    def left_out_tools(self) -> list[str]:
        """Types of tools that were sent and are not offered."""
        return types_of_hosted(self.tools)

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools in the form that the chat template takes."""
        return [{"type": "function", "function": _function(tool.function)} for _, tool in self.usable_tools]

    @property
    def callable_names(self) -> frozenset[str] | None:
        """Names of the functions that tool_choice allows; None: it does not say."""
        if isinstance(self.tool_choice, NamedTool):
            return frozenset((self.tool_choice.function.name,))
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return frozenset(tool.function.name for tool in self.tool_choice.allowed_tools.tools)
        return None

    @property
    def must_call(self) -> bool:
        """True if the answer has to be a call."""
        choice = self.tool_choice
        if isinstance(choice, AllowedToolsChoice):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedTool)

    @property
    def may_repeat_calls(self) -> bool:
        """True if more than one call may follow. A named choice is one call, as at OpenAI."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)

    @model_validator(mode="after")
    def _combinations(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise contradiction("max_tokens and max_completion_tokens contradict each other: send one", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise contradiction("top_logprobs needs logprobs=true", "top_logprobs")
        return self

    @model_validator(mode="after")
    def _tools(self) -> ChatRequest:
        if self.tool_choice not in (None, "none") and not self.tools:
            raise contradiction("tool_choice is only allowed together with tools", "tool_choice")
        check_hosted(self.tools or ())
        names: list[str] = []
        for position, tool in enumerate(self.tools or ()):
            if isinstance(tool, HostedTool):
                continue
            if tool.function.name in names:
                raise contradiction(
                    f"two tools have the name {tool.function.name!r}: give each its own",
                    f"tools[{position}].function.name",
                )
            names.append(tool.function.name)
        unknown = sorted((self.callable_names or frozenset()) - frozenset(names))
        if unknown:
            raise contradiction(
                f"tool_choice names {', '.join(map(repr, unknown))}, which is not among the tools: offer it in tools, "
                f"or name one of {', '.join(map(repr, names))}",
                "tool_choice",
            )
        return self

    @model_validator(mode="after")
    def _continuation(self) -> ChatRequest:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise contradiction(
                "continue_final_message goes on with the last message and add_generation_prompt begins a new one: "
                "send one of them",
                "add_generation_prompt",
            )
        last = self.messages[-1]
        if not isinstance(last, AssistantMessage):
            raise contradiction(
                f"continue_final_message needs a last message of the assistant, it is of the {last.role}",
                "continue_final_message",
            )
        if last.tool_calls:
            raise contradiction(
                "continue_final_message cannot go on after tool calls: add what the tools answered",
                "continue_final_message",
            )
        return self

    def turns(self) -> list[dict[str, Any]]:
        """The messages in the form that TextCodec takes."""
        return [_turn(message) for message in self.messages]


def _function(spec: FunctionSpec) -> dict[str, Any]:
    given = {"name": spec.name, "description": spec.description, "parameters": spec.parameters, "return": spec.return_}
    return {key: value for key, value in given.items() if value is not None}


def _text(content: str | list[TextPart] | None) -> str | None:
    return "".join(part.text for part in content) if isinstance(content, list) else content


def _turn(message: SystemMessage | UserMessage | AssistantMessage | ToolMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    turn["content"] = _text(message.content) or ""
    if message.name is not None:
        turn["name"] = message.name
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
        if reasoning is not None:
            turn["reasoning_content"] = reasoning
        if message.tool_calls:
            turn["tool_calls"] = [call.model_dump(exclude={"index", "cache_control"}) for call in message.tool_calls]
    return turn
