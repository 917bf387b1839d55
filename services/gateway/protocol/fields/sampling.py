"""Fields that chat and text completions share, and fields that say whether and how long a model thinks."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from services.common.validation.errors import contradiction
from services.common.validation.json_rules import Rules, at_most_one, has, if_any, only_with, true_only_with, where
from services.gateway.protocol.fields.adapters import PolicyFields
from services.gateway.protocol.fields.base import JsonObject, RequestModel, TokenId
from services.gateway.protocol.fields.structured_outputs import UNCONSTRAINED, ConstraintFields

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningFields(RequestModel):
    """Fields that say whether and how long a model thinks. The chat template decides what is left out."""

    reasoning_effort: Effort | None = None
    """"none": no thinking. Otherwise thinking, up to the budget that the gateway's settings give this effort; "max" is
    "xhigh"."""
    thinking_budget: int | None = Field(None, ge=0, lt=2**31)
    """Thinking, up to so many tokens: then the reasoning is closed and the answer begins. 0: no thinking."""
    thinking_token_budget: int | None = Field(None, ge=0, lt=2**31)
    """vLLM's name of thinking_budget."""
    chat_template_kwargs: JsonObject | None = None
    """Variables of the chat template, e.g. {"enable_thinking": true}."""

    json_rules: ClassVar[Rules] = (at_most_one("reasoning_effort", "thinking_budget", "thinking_token_budget"),)

    @property
    def budget_field(self) -> str | None:
        """The field that gives a budget, if one does."""
        if self.thinking_budget is not None:
            return "thinking_budget"
        return None if self.thinking_token_budget is None else "thinking_token_budget"

    @property
    def budget(self) -> int | None:
        """Tokens of thinking that the request asks for itself."""
        return self.thinking_token_budget if self.thinking_budget is None else self.thinking_budget

    @property
    def wants_thinking(self) -> bool | None:
        """True if the fields beside chat_template_kwargs ask for thinking, False if for none; None: neither."""
        if self.reasoning_effort is not None:
            return self.reasoning_effort != "none"
        return None if self.budget is None else self.budget > 0

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template, enable_thinking as the other fields say."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.wants_thinking is not None:
            kwargs.setdefault("enable_thinking", self.wants_thinking)
        return kwargs

    @model_validator(mode="after")
    def _agree(self) -> ReasoningFields:
        if self.thinking_budget is not None and self.thinking_token_budget is not None:
            raise contradiction(
                "thinking_budget and thinking_token_budget are the same field: send one", "thinking_token_budget"
            )
        field = self.budget_field
        if self.reasoning_effort is not None and field is not None:
            raise contradiction(
                f"reasoning_effort and {field} both set how long the model thinks: send one of them", field
            )
        said = (self.chat_template_kwargs or {}).get("enable_thinking")
        if said is None or self.wants_thinking is None:
            return self
        by = "reasoning_effort" if field is None else field
        # A budget of 0 with enable_thinking true is a template that opens the reasoning, which is closed at once.
        if bool(said) != self.wants_thinking and not (said and field is not None):
            wanted = "on" if self.wants_thinking else "off"
            raise contradiction(f"{by} turns thinking {wanted} and chat_template_kwargs.enable_thinking does not", by)
        return self


MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS = 20
MAX_BIASED = 1024

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


_TOKEN_KEY = re.compile(r"0*[0-9]{1,10}")


def _token_keys(value: Any) -> Any:
    """JSON object keys are strings; token ids are numbers."""
    if not isinstance(value, dict):
        return value
    if not all(isinstance(key, str) and _TOKEN_KEY.fullmatch(key) and int(key[-10:]) < 2**32 for key in value):
        raise ValueError("keys must be token ids")
    biases = {int(key[-10:]): bias for key, bias in value.items()}
    if len(biases) < len(value):
        raise ValueError("two keys are the same token id: give each token one bias")
    return biases


LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_token_keys),
    Field(max_length=MAX_BIASED),
    WithJsonSchema(
        {
            "type": "object",
            # No vocabulary has tokens of more digits.
            "propertyNames": {"pattern": "^0*[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_BIASED,
        }
    ),
]


class StreamOptions(RequestModel):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    """Send one more chunk with the usage, before [DONE]."""
    continuous_usage_stats: bool | None = None
    """Whether every chunk has the usage so far; with include_usage."""
    include_obfuscation: bool | None = None
    """Accepted and ignored: chunks are never padded."""

    json_rules: ClassVar[Rules] = (true_only_with("continuous_usage_stats", has(include_usage=True)),)


class SamplerFields(PolicyFields):
    """Fields of the sampler, in every API that has them under these names."""

    temperature: float | None = Field(None, ge=0, le=2)
    """0 is greedy; default 1."""
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    """0 or -1: off."""
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    """Equal seeds give equal tokens, whatever else the engine is doing."""
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: LogitBias | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    """Up to four strings that end the text and are not part of it."""


class SamplingFields(SamplerFields, ConstraintFields):
    """Fields of a generation. null is the same as leaving a field out."""

    n: int | None = Field(None, ge=1)
    """Choices a prompt. With a seed, choice i uses seed + i."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    """No end of text before so many tokens, and stops that end within them do not count."""
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    ignore_eos: bool | None = None
    """Go on after the end-of-text token, up to max_tokens."""
    return_token_ids: bool | None = None
    """Adds `prompt_token_ids`, and per choice `token_ids` and `sampling_logprobs` (log-probability of each sampled
    token under the tempered distribution it was drawn from), as training on rollouts needs them. `logprobs` of a
    completion then have an entry for each of `token_ids`, that of the token that ended the text among them."""
    return_tokens_as_token_ids: bool | None = None
    """`logprobs` name a token by its id (`token_id:5`), have an entry for each of `token_ids`, and one among the
    alternatives also where `logprobs` is 0. vLLM's field, which TRL sends."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """Adds `prompt_logprobs`: of each token of the prompt, with so many alternatives. Not together with stream."""
    session_id: str | None = Field(None, min_length=1, max_length=256)
    """Requests of one session go to one engine while it is there, and what that has computed of the session is kept
    before other things; `usage.session` says which engine it is. The header X-Session-Id says the same."""
    prompt_cache_key: str | None = Field(None, max_length=1024)
    """Without `session_id`: the session that is kept, without being bound to one engine; prompts that no engine has
    seen go to the same one under the same key. What is cached is found by its tokens; see cache_salt for isolation."""
    user: str | None = None
    """Stands in for a `prompt_cache_key` that is not given."""

    json_rules: ClassVar[Rules] = (
        only_with("stream_options", has(stream=True)),
        where(has(ignore_eos=True), UNCONSTRAINED),
        where(has(min_tokens={"type": "integer", "minimum": 1}), UNCONSTRAINED),
        only_with("prompt_logprobs", if_any(stream={"enum": [False, None]})),
    )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def choices(self) -> int:
        """Choices a prompt."""
        return self.n or 1

    @property
    def left_out_tools(self) -> list[str]:
        """Types of tools that were sent and are not offered."""
        return []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        """True if every chunk has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def _streaming(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise contradiction("stream_options is only allowed together with stream=true", "stream_options")
        if self.usage_in_chunks and not self.include_usage:
            raise contradiction(
                "continuous_usage_stats needs include_usage=true", "stream_options.continuous_usage_stats"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise contradiction("prompt_logprobs come in one piece: leave out stream", "prompt_logprobs")
        return self


ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None
"""Service tier that OpenAI's clients ask for; the answer says which tier it had."""
Verbosity = Literal["low", "medium", "high"]
