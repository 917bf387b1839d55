"""Bodies of POST /v1/responses and of /v1/conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from services.common.validation.errors import contradiction
from services.common.validation.json_rules import (
    NULL,
    Rules,
    contains,
    has,
    if_any,
    only_with,
    true_only_with,
    where,
)
from services.gateway.protocol.chat_request import NOT_ONLY_HOSTED, TOOL_CHOICE_NEEDS_TOOLS, Metadata
from services.gateway.protocol.fields.base import AnswerModel, CacheOptions, JsonObject, RequestModel, unsupported
from services.gateway.protocol.fields.sampling import MAX_TOP_LOGPROBS, SamplerFields, ServiceTier, Verbosity
from services.gateway.protocol.responses.items import MAX_ITEMS, InputItem
from services.gateway.protocol.responses.response import InputItemOut
from services.gateway.protocol.responses.tools import OfferedTool, ToolChoice

LOGPROBS = "message.output_text.logprobs"
_FORMATS = ("text", "json_object", "json_schema")


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
    verbosity: Verbosity | None = None
    """Told with the response and ignored: ask for the length you want in the prompt."""


class ReasoningOptions(RequestModel):
    """How the model thinks, and how that is told."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Same as reasoning_effort in chat completions."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """The thinking comes as the item's summary, whole, instead of its content: for clients that read only that."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Older name of summary."""
    context: Literal["auto"] | None = None
    """Only "auto": which reasoning items the model sees again is up to the chat template."""
    mode: Literal["standard"] | None = None
    """Only "standard"."""


class ResponseStreamOptions(RequestModel):
    """Options of a streamed response."""

    include_obfuscation: bool | None = None
    """Accepted and ignored: events are never padded."""


Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
PreviousId = Annotated[str, Field(min_length=1, max_length=128)]


class ConversationName(RequestModel):
    """A conversation by its id."""

    id: PreviousId


class ResponseRequest(SamplerFields):
    """OpenAI's Responses API over the same model, with the sampling fields of open models. null is the same as leaving
    a field out."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS)]
    """A user's message, or the items of a conversation."""
    instructions: str | None = None
    """A system message before everything else. It is not carried over by previous_response_id."""
    previous_response_id: PreviousId | None = None
    """A stored response that this one continues: what it was given and what it answered come before `input`."""
    conversation: PreviousId | ConversationName | None = None
    """A conversation, or its id: its items come before `input`, and input and answer are added to it. Not together with
    previous_response_id."""
    tools: Annotated[list[OfferedTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice = None
    """"auto" (the default), "none", "required", one function, or some of them."""
    parallel_tool_calls: bool | None = None
    """false: the answer ends with its first call."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Include], Field(max_length=16)] | None = None
    """Log-probabilities of the text. The others add nothing: reasoning is told openly and can be sent back as it is,
    and there are no hosted tools and no images."""
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    """Reasoning included. Default: as much as fits, up to the gateway's setting."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """Alternatives a token; needs include ["message.output_text.logprobs"]."""
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    """Kept and told with the response."""
    client_metadata: JsonObject | None = None
    """Accepted and ignored: what a client says of itself."""
    access_programs: JsonObject | None = None
    """Accepted and ignored: whoever may ask this model may ask it anything."""
    store: bool | None = None
    """Keep the response for previous_response_id and GET; default true."""
    background: bool | None = None
    """Answer at once and go on without a connection: poll GET, end it with cancel. Needs store, and no stream."""
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """"auto": of input that does not fit, the oldest messages are left out. Default: it is refused."""
    service_tier: ServiceTier = None
    """Accepted and ignored: there is one tier, which the response tells."""
    max_tool_calls: int | None = Field(None, ge=1, lt=2**31)
    """Accepted and ignored: it limits the calls of hosted tools, of which there are none."""
    user: str | None = None
    """Told with the response; without `prompt_cache_key` it stands in for that."""
    safety_identifier: str | None = None
    """Told with the response."""
    prompt_cache_key: str | None = Field(None, max_length=1024)
    """Same as in chat; told with the response."""
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    """Accepted and ignored."""
    prompt_cache_options: CacheOptions | None = None

    chat_template_kwargs: JsonObject | None = None
    """Variables of the chat template, e.g. {"enable_thinking": true}."""

    refused: ClassVar[Mapping[str, str]] = {
        "prompt": "there are no stored prompts, send instructions and input",
        "context_management": "send the items that the model shall see",
        "moderation": "check texts before you send them",
        "image": "this model reads text",
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
        NOT_ONLY_HOSTED,
        only_with("conversation", if_any(previous_response_id=NULL)),
    )

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation that the response belongs to."""
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation

    @property
    def stored(self) -> bool:
        """True if the client wants the response kept."""
        return self.store is not False

    @property
    def logprobs(self) -> bool:
        """True if the client wants log-probabilities."""
        return LOGPROBS in (self.include or ())

    @property
    def summarised(self) -> bool:
        """True if thinking is told as a summary."""
        options = self.reasoning
        return options is not None and (options.summary or options.generate_summary) is not None

    @model_validator(mode="after")
    def _combinations(self) -> ResponseRequest:
        if self.stream_options is not None and not self.stream:
            raise contradiction("stream_options is only allowed together with stream=true", "stream_options")
        if self.top_logprobs and not self.logprobs:
            raise contradiction(f'top_logprobs needs include ["{LOGPROBS}"]', "top_logprobs")
        if self.conversation is not None and self.previous_response_id is not None:
            raise contradiction(
                "conversation and previous_response_id each say what the response continues: send one of them",
                "previous_response_id",
            )
        if self.background and self.store is False:
            raise contradiction("a background response has to be stored: leave store out", "store")
        if self.background and self.stream:
            raise contradiction(
                "a background response cannot be streamed: leave stream out and poll GET /v1/responses/{id}", "stream"
            )
        return self


MAX_ADDED = 20
"""Items at a time, as at OpenAI."""


class ConversationRequest(RequestModel):
    """A new conversation."""

    items: Annotated[list[InputItem], Field(max_length=MAX_ADDED)] | None = None
    """What it begins with."""
    metadata: Metadata | None = None


class ItemsRequest(RequestModel):
    """More items of a conversation."""

    items: Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ADDED)]


class ConversationOut(AnswerModel):
    """A conversation."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(AnswerModel):
    """A conversation that is not kept any more."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class ConversationItemsOut(AnswerModel):
    """A page of a conversation's items."""

    object: Literal["list"]
    data: list[InputItemOut]
    first_id: str | None
    last_id: str | None
    has_more: bool
