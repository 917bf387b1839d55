"""POST /tokenize and /detokenize, and GET /tokenizer_info: vLLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.common.validation.errors import contradiction
from services.common.validation.json_rules import Rules, exactly_one, given, only_with, true_only_with
from services.gateway.protocol.chat_request import CONTINUES_OR_BEGINS, NOT_ONLY_HOSTED, Message
from services.gateway.protocol.fields.base import JsonObject, RequestModel, TokenId
from services.gateway.protocol.fields.tools import OfferedTool

_CHAT_ONLY = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class TokenizeRequest(RequestModel):
    """A text, or a conversation: then the tokens are those of a chat completion's prompt."""

    model: str | None = Field(None, min_length=1, max_length=256)
    """The base model's name or an adapter: all have one tokenizer, so it is not looked whether an adapter exists."""
    prompt: str | None = None
    """A text, used as it is: control tokens in it are recognised, as in a text completion's prompt."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=128)] | None = None
    add_generation_prompt: bool | None = None
    """Same as in a chat completion: default true, or false with continue_final_message."""
    continue_final_message: bool | None = None
    """Same as in a chat completion."""
    chat_template_kwargs: JsonObject | None = None
    """Variables of the chat template, e.g. {"enable_thinking": true}."""
    add_special_tokens: bool | None = None
    """true: with those that the tokenizer itself puts around a text, which completions leave out. Not with messages:
    the chat template writes them."""
    return_token_strs: bool | None = None
    """Adds `token_strs`: each token as it stands in the vocabulary."""

    refused: ClassVar[Mapping[str, str]] = {
        "chat_template": "the checkpoint's own is used; its variables go into chat_template_kwargs",
        "mm_processor_kwargs": "this model reads text",
        "media_io_kwargs": "this model reads text",
    }
    json_rules: ClassVar[Rules] = (
        exactly_one("prompt", "messages"),
        *(only_with(field, given("messages")) for field in _CHAT_ONLY),
        true_only_with("add_special_tokens", given("prompt")),
        CONTINUES_OR_BEGINS,
        NOT_ONLY_HOSTED,
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise contradiction("send either prompt or messages", "prompt")
        if self.prompt is not None:
            for field in _CHAT_ONLY:
                if getattr(self, field) is not None:
                    raise contradiction(f"{field} is only allowed together with messages", field)
        elif self.add_special_tokens:
            raise contradiction(
                "add_special_tokens is only allowed together with prompt: the chat template writes them",
                "add_special_tokens",
            )
        return self

    def chat_form(self, model: str) -> dict[str, Any]:
        """The chat completion that has this prompt, as its JSON object."""
        given = {field: getattr(self, field) for field in ("messages", *_CHAT_ONLY)}
        return {"model": self.model or model} | {field: value for field, value in given.items() if value is not None}


class DetokenizeRequest(RequestModel):
    """Tokens."""

    model: str | None = Field(None, min_length=1, max_length=256)
    """Same as in /tokenize."""
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class TokenizeAnswer(BaseModel):
    """The tokens."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    count: int
    max_model_len: int
    """Tokens of prompt and completion together that the model takes."""
    tokens: list[int]
    token_strs: list[str] | None
    """Text of each token; with return_token_strs."""


class RenderedPrompt(BaseModel):
    """The prompt of a request."""

    model_config = ConfigDict(extra="forbid")

    token_ids: list[int]


class DetokenizeAnswer(BaseModel):
    """The text; bytes that are not UTF-8 are U+FFFD."""

    model_config = ConfigDict(extra="forbid")

    prompt: str


class TokenizerInfo(BaseModel):
    """The checkpoint's tokenizer_config.json with its chat template."""

    model_config = ConfigDict(extra="allow")

    chat_template: str | None
