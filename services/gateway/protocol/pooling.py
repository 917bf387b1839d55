"""POST /v1/embeddings and POST /v1/score."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from services.common.validation.errors import contradiction
from services.common.validation.json_rules import Rules, at_most_one, given, only_with
from services.gateway.protocol.chat_request import ChatRequest, Message
from services.gateway.protocol.completions import CachedTokens, Texts, TokenIds, as_list
from services.gateway.protocol.fields.adapters import PolicyFields
from services.gateway.protocol.fields.base import AnswerModel, JsonObject
from services.gateway.protocol.fields.tools import Tool

MAX_SCORE_ALTERNATIVES = 128


class ReadingFields(PolicyFields):
    """Fields of requests whose prompts are read and not answered."""

    user: str | None = None
    """Accepted and ignored."""


class EmbeddingsRequest(ReadingFields):
    """OpenAI's embeddings: the model's hidden states of a text as one vector."""

    input: Texts
    """Text, token ids, or a list of either: one vector for each."""
    encoding_format: Literal["float", "base64"] | None = None
    """"base64": of little-endian float32. Default: "float"."""
    dimensions: int | None = Field(None, ge=1, lt=2**31)
    """Only so many of the first numbers, then normalised."""
    pooling: Literal["last", "mean"] | None = None
    """The hidden state behind the last token (default), or the mean over all tokens; behind the final norm."""
    normalize: bool | None = None
    """Scale to length 1; default true."""

    @property
    def inputs(self) -> list[str | list[int]]:
        """The input in its list form."""
        return as_list(self.input)


class ScoreRequest(ReadingFields):
    """How likely given texts are behind a prompt or a conversation."""

    prompt: str | TokenIds | None = None
    """What stands before: text or token ids. Without it, and without messages, the first token of a completion has
    nothing before it, and no log-probability."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    """Or a conversation, in the model's chat template: the completion is the next answer."""
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    """With messages."""
    chat_template_kwargs: JsonObject | None = None
    """With messages."""
    completion: Texts
    """What is scored: text, token ids, or a list of either. Text is tokenized by itself, not together with the prompt;
    behind messages, special tokens in it are plain text."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_SCORE_ALTERNATIVES)
    """Adds the likeliest tokens in the place of each."""
    return_token_ids: bool | None = None
    """Adds `prompt_token_ids`, and per completion `token_ids`."""

    json_rules: ClassVar[Rules] = (
        at_most_one("prompt", "messages"),
        only_with("tools", given("messages")),
        only_with("chat_template_kwargs", given("messages")),
    )

    @property
    def completions(self) -> list[str | list[int]]:
        """The completions in their list form."""
        return as_list(self.completion)

    def chat(self) -> ChatRequest | None:
        """The conversation as a chat request, if there is one."""
        if self.messages is None:
            return None
        return ChatRequest(
            model=self.model,
            messages=self.messages,
            tools=None if self.tools is None else [*self.tools],
            chat_template_kwargs=self.chat_template_kwargs,
        )

    @model_validator(mode="after")
    def _combinations(self) -> ScoreRequest:
        if self.prompt is not None and self.messages is not None:
            raise contradiction("prompt and messages exclude each other: send one", "prompt")
        for name in ("tools", "chat_template_kwargs"):
            if getattr(self, name) is not None and self.messages is None:
                raise contradiction(f"{name} is only allowed together with messages", name)
        return self


class ReadingUsage(AnswerModel):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Embedding(AnswerModel):
    """One vector."""

    object: Literal["embedding"]
    index: int
    """Index of its input."""
    embedding: list[float] | str
    """Numbers, or base64."""
    adapter: str | None
    """The version that read this input."""


class EmbeddingsResponse(AnswerModel):
    """One vector for each input, in their order."""

    object: Literal["list"]
    model: str
    adapter: str | None
    data: list[Embedding]
    usage: ReadingUsage


class Score(AnswerModel):
    """How likely one completion is. Natural logarithms, of the plain model: no temperature."""

    object: Literal["score"]
    index: int
    """Index of its completion."""
    logprob: float
    """Log-probability of all its tokens together: the sum of token_logprobs."""
    tokens: int
    """How many it has."""
    is_greedy: bool
    """No other token was likelier in any place: greedy sampling would have said the same."""
    token_logprobs: list[float | None]
    """Log-probability of each token; null for one that has nothing before it."""
    ranks: list[int | None]
    """1: no other token was likelier there."""
    top_token_ids: list[list[int]] | None = None
    """Likeliest tokens in each place, most likely first. With top_logprobs."""
    top_logprobs: list[list[float]] | None = None
    """Theirs."""
    token_ids: list[int] | None = None
    adapter: str | None
    """The version that read it."""


class ScoreResponse(AnswerModel):
    """One score for each completion, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    adapter: str | None
    data: list[Score]
    usage: ReadingUsage
    prompt_token_ids: list[int] | None = None
