"""Bodies of POST /v1/completions and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from services.common.validation.errors import contradiction
from services.common.validation.json_rules import Rules, has, where
from services.gateway.protocol.fields.base import AnswerModel, TokenId
from services.gateway.protocol.fields.sampling import MAX_TOP_LOGPROBS, SamplingFields

# fail_fast: one error is told, and the errors of a million entries would fill the memory.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
# An empty text is refused behind the tokenizer, with the message that an empty prompt has anywhere.
Text = Annotated[str, Field(json_schema_extra={"minLength": 1})]
Texts = (
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
)
"""Text, token ids, or a list of either."""


def as_list(texts: str | list[Any]) -> list[str | list[int]]:
    """``Texts`` in their list form."""
    if isinstance(texts, str):
        return [texts]
    return [texts] if isinstance(texts[0], int) else texts


class CompletionRequest(SamplingFields):
    """OpenAI's text completion, with token-id prompts and the fields of reinforcement learning."""

    prompt: Texts
    """Text, token ids, or a list of either: n choices for each."""
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """Log-probabilities of the sampled token and of so many alternatives."""
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    """0: only the prompt, with echo. Default: 16."""
    echo: bool | None = None
    """Put the prompt before the text, and its tokens before those of logprobs. Then the token that ended the text is
    among those, too."""
    best_of: int | None = Field(None, ge=1)
    """Only equal to n: the gateway does not rank choices."""

    refused: ClassVar[Mapping[str, str]] = {
        "suffix": "the model does not fill in the middle; put all context in the prompt"
    }
    json_rules: ClassVar[Rules] = (where(has(max_tokens=0), has(echo=True)),)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompt in its list form."""
        return as_list(self.prompt)

    @property
    def tells_prompt(self) -> bool:
        """True if log-probabilities of the prompt are part of the answer."""
        return self.prompt_logprobs is not None or (bool(self.echo) and self.logprobs is not None)

    @model_validator(mode="after")
    def _combinations(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.choices:
            raise contradiction("best_of must equal n or be left out: choices are not ranked", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise contradiction("max_tokens=0 says nothing without the prompt: send echo=true", "max_tokens")
        return self


class CachedTokens(AnswerModel):
    """Part of the prompt tokens."""

    cached_tokens: int
    """Came from the prefix cache."""


class ReasoningTokens(AnswerModel):
    """Part of the completion tokens."""

    reasoning_tokens: int
    """Their text is reasoning; the tags around it do not count."""


class SessionUse(AnswerModel):
    """The session that the request named."""

    id: str
    engine: str
    """Name of the engine that answered it; an opaque name that stays the same while the session is there."""


class CompletionUsage(AnswerModel):
    """Token counts of all prompts and choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens
    session: SessionUse | None = None
    """Absent without `session_id`."""


class TextLogprobs(AnswerModel):
    """Four lists with one entry a token, natural logarithms; with echo the prompt's tokens come first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of a prompt, which has nothing before it."""
    top_logprobs: list[dict[str, float] | None] | None
    """Alternatives by their text; the token itself is always among them. null if none were asked for."""
    text_offset: list[int]
    """Where in the text each token begins, in characters."""


class PromptToken(AnswerModel):
    """A token in one place of a prompt."""

    logprob: float
    rank: int
    """1: no other was likelier."""
    decoded_token: str


class TextChoice(AnswerModel):
    """One completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    """null in a chunk that is not a choice's last."""
    completion_id: str
    """Name of the rollout in `POST /v1/train/grpo`."""
    adapter: str | None
    prompt_logprobs: list[dict[str, PromptToken] | None] | None = None
    """Log-probabilities by token id; null for the first token. With prompt_logprobs."""
    prompt_token_ids: list[int] | None = None
    """Token ids of the prompt; with return_token_ids."""
    token_ids: list[int] | None = None
    sampling_logprobs: list[float | None] | None = None


class CompletionResponse(AnswerModel):
    """A completion in one piece, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    adapter: str | None
    """The version that answered; null: the model without adapter."""
    choices: list[TextChoice]
    usage: CompletionUsage | None = None
    """Usage; in a stream with stream_options.include_usage in the last chunk, and null in those before."""
    prompt_token_ids: list[int] | None = None
