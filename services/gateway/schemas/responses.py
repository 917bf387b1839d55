"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from services.common.json_rules import (
    Rules,
    contains,
    has,
    if_any,
    only_with,
    true_only_with,
    where,
)
from services.gateway.schemas.base import JsonObject, RequestModel, contradiction, unsupported
from services.gateway.schemas.chat import TOOL_CHOICE_NEEDS_TOOLS
from services.gateway.schemas.responses_items import MAX_ITEMS, InputItem
from services.gateway.schemas.sampling import MAX_TOP_LOGPROBS, SamplerFields, ServiceTier

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
_FORMATS = ("text", "json_object", "json_schema")


def _tool_type(value: Any) -> Any:
    if isinstance(value, str) and value != "function":
        raise unsupported(
            f"tools of type {value[:40]!r} are not supported: nothing is run here, offer a function of your own and "
            "answer its calls"
        )
    return value


class FunctionTool(RequestModel):
    """A function that the model may call, and the client runs."""

    type: Annotated[Literal["function"], BeforeValidator(_tool_type)]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: JsonObject | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """As in chat completions; null: false."""

    refused: ClassVar[Mapping[str, str]] = {
        "allowed_callers": "functions are called by the model alone",
        "async": "calls are answered in the next request",
        "defer_loading": "all tools are shown to the model, offer fewer",
        "output_schema": "describe what the function returns in its description",
    }


class FunctionName(RequestModel):
    """A function by its name."""

    type: Annotated[Literal["function"], BeforeValidator(_tool_type)]
    name: str = Field(min_length=1, max_length=64)


class AllowedTools(RequestModel):
    """Only some of the tools may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionName], Field(min_length=1, max_length=128)]


def _tool_choice(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
        raise unsupported(
            f"tool_choice of type {kind[:40]!r} is not supported: send 'auto', 'none', 'required', "
            '{"type": "function", "name"} or {"type": "allowed_tools", "mode", "tools"}'
        )
    return value


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | FunctionName | AllowedTools | None, BeforeValidator(_tool_choice)
]


def _format_type(value: Any) -> Any:
    if isinstance(value, str) and value not in _FORMATS:
        raise unsupported(f"text.format {value[:40]!r} is not supported: send one of {', '.join(_FORMATS)}")
    return value


class PlainFormat(RequestModel):
    """Any text, or any JSON object."""

    type: Annotated[Literal["text", "json_object"], BeforeValidator(_format_type)]


class SchemaFormat(RequestModel):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    json_schema: JsonObject = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(RequestModel):
    """What the text has to be."""

    format: PlainFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None
    """Only "medium", which changes nothing: ask for the length you want in the prompt."""


class ReasoningOptions(RequestModel):
    """How the model thinks, and how that is told."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """As reasoning_effort in chat completions."""
    summary: Literal["auto", "detailed"] | None = None
    """The thinking comes as the item's summary, whole, instead of its content: for clients that read only that."""

    refused: ClassVar[Mapping[str, str]] = {
        "generate_summary": "use summary, its successor",
        "context": "send the reasoning items that the model shall see",
        "mode": "leave it out, there is one mode",
    }


class ResponseStreamOptions(RequestModel):
    """Options of a streamed response."""

    include_obfuscation: bool | None = None
    """Accepted and ignored: events are never padded."""


def _truncation(value: Any) -> Any:
    if value == "auto":
        raise unsupported("truncation 'auto' is not supported: nothing is dropped silently, send fewer items")
    return value


def _include(value: Any) -> Any:
    if isinstance(value, str) and value not in (LOGPROBS, ENCRYPTED_REASONING):
        raise unsupported(f"include {value[:60]!r} is not supported: there are no hosted tools and no images here")
    return value


Include = Annotated[
    Literal["message.output_text.logprobs", "reasoning.encrypted_content"],
    BeforeValidator(_include),
]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
PreviousId = Annotated[str, Field(min_length=1, max_length=128)]


class ResponseRequest(SamplerFields):
    """OpenAI's Responses API over the same model, with the sampling fields of open models. null is the same as leaving
    a field out."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS)]
    """A user's message, or the items of a conversation."""
    instructions: str | None = None
    """A system message before everything else. It is not carried over by previous_response_id."""
    previous_response_id: PreviousId | None = None
    """A stored response that this one continues: what it was given and what it answered come before `input`."""
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice = None
    """"auto" (the default), "none", "required", one function, or some of them."""
    parallel_tool_calls: bool | None = None
    """false: the answer ends with its first call."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Include], Field(max_length=16)] | None = None
    """Log-probabilities of the text; "reasoning.encrypted_content" adds nothing, since reasoning is told openly and can
    be sent back as it is."""
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    """Reasoning included. Default: as much as fits, up to the gateway's setting."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """Alternatives a token; needs include ["message.output_text.logprobs"]."""
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    """Kept and told with the response."""
    store: bool | None = None
    """Keep the response for previous_response_id and GET; default true."""
    background: bool | None = None
    """Answer at once and go on without a connection: poll GET, end it with cancel. Needs store, and no stream."""
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Annotated[Literal["disabled"] | None, BeforeValidator(_truncation)] = None
    """Only "disabled": input that does not fit is refused."""
    service_tier: ServiceTier = None
    """Only "auto" or "default"."""
    user: str | None = None
    """Told with the response; without `prompt_cache_key` it stands in for that."""
    safety_identifier: str | None = None
    """Told with the response."""
    prompt_cache_key: str | None = Field(None, max_length=1024)
    """As in chat, and told with the response."""
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    """Accepted and ignored."""

    chat_template_kwargs: JsonObject | None = None
    """Variables of the chat template, e.g. {"enable_thinking": true}."""

    refused: ClassVar[Mapping[str, str]] = {
        "conversation": "use previous_response_id, or send the items",
        "prompt": "there are no stored prompts, send instructions and input",
        "context_management": "send the items that the model shall see",
        "max_tool_calls": "there are no hosted tools whose calls it could limit",
        "moderation": "check texts before you send them",
        "image": "this model reads text",
        "access_programs": "leave it out",
        "prompt_cache_options": "use cache_salt for isolation",
        "messages": "this is the Responses API, send input",
        "max_tokens": "use max_output_tokens",
        "max_completion_tokens": "use max_output_tokens",
        "response_format": "use text.format",
        "reasoning_effort": "use reasoning.effort",
        "n": "a response has one answer, send several requests",
    }
    json_rules: ClassVar[Rules] = (
        only_with("stream_options", has(stream=True)),
        where(has(top_logprobs={"type": "integer", "minimum": 1}), has(include=contains({"const": LOGPROBS}))),
        true_only_with("background", if_any(store={"enum": [True, None]}, stream={"enum": [False, None]})),
        TOOL_CHOICE_NEEDS_TOOLS,
    )

    @property
    def stored(self) -> bool:
        """The client wants it kept."""
        return self.store is not False

    @property
    def logprobs(self) -> bool:
        """The client wants log-probabilities."""
        return LOGPROBS in (self.include or ())

    @property
    def summarised(self) -> bool:
        """Thinking is told as a summary."""
        return self.reasoning is not None and self.reasoning.summary is not None

    @model_validator(mode="after")
    def _combinations(self) -> ResponseRequest:
        if self.stream_options is not None and not self.stream:
            raise contradiction("stream_options is only allowed together with stream=true", "stream_options")
        if self.top_logprobs and not self.logprobs:
            raise contradiction(f'top_logprobs needs include ["{LOGPROBS}"]', "top_logprobs")
        if self.background and self.store is False:
            raise contradiction("a background response has to be stored: leave store out", "store")
        if self.background and self.stream:
            raise contradiction(
                "a background response cannot be streamed: leave stream out and poll GET /v1/responses/{id}", "stream"
            )
        return self
