"""What POST /v1/completions answers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Part of an answer: all fields that there can be."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid")


class CachedTokens(Answer):
    """Part of the prompt tokens."""

    cached_tokens: int
    """Came from the prefix cache."""


class ReasoningTokens(Answer):
    """Part of the completion tokens."""

    reasoning_tokens: int
    """Their text is reasoning; the tags around it do not count."""


class SessionUse(Answer):
    """The session that the request named."""

    id: str
    engine: str
    """Name of the engine that answered it; an opaque name that stays the same while the session is there."""


class CompletionUsage(Answer):
    """Token counts of all prompts and choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens
    session: SessionUse | None = None
    """Absent without `session_id`."""


class TextLogprobs(Answer):
    """Four lists with one entry a token, natural logarithms; with echo the prompt's tokens come first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of a prompt, which has nothing before it."""
    top_logprobs: list[dict[str, float] | None] | None
    """Alternatives by their text; the token itself is always among them. null if none were asked for."""
    text_offset: list[int]
    """Where in the text each token begins, in characters."""


class PromptToken(Answer):
    """A token in one place of a prompt."""

    logprob: float
    rank: int
    """1: no other was likelier."""
    decoded_token: str


class TextChoice(Answer):
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


class CompletionResponse(Answer):
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
