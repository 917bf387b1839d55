"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, model_validator

from services.gateway.schemas.base import JsonObject, RequestModel, contradiction, unsupported
from services.gateway.schemas.sampling import MAX_TOP_LOGPROBS, ResponseFormat, SamplingFields, ServiceTier

_FOREIGN_PARTS = ("image_url", "input_audio", "file", "image", "video", "video_url", "audio", "refusal")


def _text_part(value: Any) -> Any:
    if value in _FOREIGN_PARTS:
        raise unsupported(f"content parts of type {value!r} are not supported: this model reads text, send text parts")
    return value


class TextPart(RequestModel):
    """A piece of a message's text."""

    type: Annotated[Literal["text"], BeforeValidator(_text_part)]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1)]


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


class SystemMessage(RequestModel):
    """Instructions. "developer" is the same as "system"."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(RequestModel):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(RequestModel):
    """What the model said before."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """The thinking before the content, as a response gave it."""
    reasoning: str | None = None
    """Other name of reasoning_content."""
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None
    """Accepted and ignored."""
    annotations: list[JsonObject] | None = None
    """Accepted and ignored: openai-python's messages carry it."""

    refused: ClassVar[Mapping[str, str]] = {
        "function_call": "use tool_calls, its successor",
        "audio": "this model reads text",
    }

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls and self.reasoning_content is None and self.reasoning is None:
            raise contradiction("an assistant message needs content or tool_calls", "content")
        return self


class ToolMessage(RequestModel):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Discriminator("role")]


class FunctionSpec(RequestModel):
    """A function the model may call."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: JsonObject | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Accepted and ignored: arguments follow the schema as far as the model does."""


class Tool(RequestModel):
    """A tool the model may call."""

    type: Literal["function"]
    function: FunctionSpec


def _tool_choice(value: Any) -> Any:
    if value not in (None, "auto", "none"):
        raise unsupported("a forced tool_choice is not supported: send 'auto' or 'none'")
    return value


def _modalities(value: Any) -> Any:
    if value not in (None, ["text"]):
        raise unsupported("modalities other than ['text'] are not supported: this model writes text")
    return value


def _store(value: Any) -> Any:
    if value is True:
        raise unsupported("store=true is not supported: completions are not kept, save what you need")
    return value


class ChatRequest(SamplingFields):
    """OpenAI's chat completion, with the fields of open models and of reinforcement learning."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    """Newer name of max_tokens. Without either: as much as fits, up to the gateway's setting."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Annotated[Literal["auto", "none"] | None, BeforeValidator(_tool_choice)] = None
    """"auto": the model decides; "none": it is not shown the tools."""
    parallel_tool_calls: bool | None = None
    """false: the answer ends with its first tool call."""
    response_format: ResponseFormat | None = None
    """Only {"type": "text"}."""
    chat_template_kwargs: JsonObject | None = None
    """Variables of the chat template, e.g. {"enable_thinking": true}."""
    modalities: Annotated[list[str] | None, BeforeValidator(_modalities)] = None
    """Only ["text"]."""
    metadata: dict[str, str] | None = None
    """Accepted and ignored."""
    store: Annotated[bool | None, BeforeValidator(_store)] = None
    """Only false."""
    service_tier: ServiceTier = None
    """Only "auto" or "default"."""
    safety_identifier: str | None = None
    """Accepted and ignored."""
    prompt_cache_key: str | None = None
    """Accepted and ignored: prompts are matched by their tokens; see cache_salt for isolation."""
    prompt_cache_retention: str | None = None
    """Accepted and ignored."""

    refused: ClassVar[Mapping[str, str]] = {
        "audio": "this model writes text",
        "function_call": "use tool_choice, its successor",
        "functions": "use tools, its successor",
        "prediction": "leave it out, the answer is the same",
        "reasoning_effort": 'send chat_template_kwargs {"enable_thinking": true or false}',
        "verbosity": "ask for the length you want in the prompt",
        "web_search_options": "offer a search function in tools",
        "moderation": "check texts before you send them",
        "prompt_cache_options": "use cache_salt for isolation",
    }

    @property
    def token_limit(self) -> int | None:
        """The limit asked for, if any."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools in the form the chat template takes; none under tool_choice "none"."""
        if self.tool_choice == "none":
            return []
        return [{"type": "function", "function": _function(tool.function)} for tool in self.tools or ()]

    @model_validator(mode="after")
    def _combinations(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise contradiction("max_tokens and max_completion_tokens contradict each other: send one", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise contradiction("top_logprobs needs logprobs=true", "top_logprobs")
        if self.tool_choice == "auto" and not self.tools:
            raise contradiction("tool_choice is only allowed together with tools", "tool_choice")
        return self

    def turns(self) -> list[dict[str, Any]]:
        """The messages in the form that TextCodec takes."""
        return [_turn(message) for message in self.messages]


def _function(spec: FunctionSpec) -> dict[str, Any]:
    given = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
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
            turn["tool_calls"] = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
    return turn
