"""Sampling parameters of a request: how tokens are chosen and what the output must look like. Plain data, no torch."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from services.common.errors import InvalidRequest

_MAX_CLOSING = 256
"""Most tokens that close the reasoning: a sentence, not an answer."""


class ConstraintKind(enum.Enum):
    """Notation of a constraint."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    CHOICES = "choices"


MOST_STOP_TOKENS = 8
"""Most stop tokens of its own that a request with draft tokens has."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint: the language of an answer. Constraints that differ only in ``param`` are compiled once."""

    kind: ConstraintKind
    source: tuple[str, ...]
    """Source: the texts to choose from; for other kinds one text."""
    param: str = "constraint"
    """Request field that a refusal names."""

    def __post_init__(self) -> None:
        if not self.source:
            raise InvalidRequest("there must be at least one text to choose from", param=self.param)
        if self.kind is not ConstraintKind.CHOICES and len(self.source) != 1:
            raise ValueError(f"a {self.kind.value} is one text, got {len(self.source)}")

    @property
    def key(self) -> tuple[ConstraintKind, tuple[str, ...]]:
        """Cache key of the compiled grammar."""
        return self.kind, self.source

    @property
    def size(self) -> int:
        """Bytes of the source in UTF-8; a lone surrogate counts as one that is encoded."""
        return sum(len(text.encode("utf-8", "surrogatepass")) for text in self.source)


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning that the output begins in, and the token that ends it.

    Raises:
        InvalidRequest: the closing tokens do not end with that token, or have it elsewhere too.
    """

    end_token_id: int
    budget: int | None = None
    """Most tokens of the reasoning; None: there is no limit."""
    closing_ids: tuple[int, ...] = ()
    """Tokens that close the reasoning when the budget is used up; empty: the end token alone."""
    call_token_id: int | None = None
    """Token with which the answer may begin before the reasoning is closed."""

    def __post_init__(self) -> None:
        closing = self.closing
        if self.budget is not None and self.budget < 0:
            raise InvalidRequest("the thinking budget must not be negative", param="thinking")
        if closing[-1] != self.end_token_id or self.end_token_id in closing[:-1] or len(closing) > _MAX_CLOSING:
            raise InvalidRequest(
                f"closing_token_ids must be at most {_MAX_CLOSING} tokens, of which the last and no other is the token "
                f"that ends the reasoning ({self.end_token_id})",
                param="thinking",
            )

    @property
    def closing(self) -> tuple[int, ...]:
        return self.closing_ids or (self.end_token_id,)


_WITH_FORCED = frozenset({"temperature", "max_tokens", "ignore_eos", "top_logprobs", "forced_ids"})
"""Parameters that have a meaning with forced tokens."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. Defaults are OpenAI's.

    Raises:
        InvalidRequest: a value is out of range; ``param`` names it.
    """

    temperature: float = 1.0
    """Temperature; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens to sample from; 0 is off."""
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int = 16
    top_logprobs: int | None = None
    """Alternatives to report with raw log-probabilities; 0: the sampled token only; None: no raw log-probabilities."""
    forced_ids: tuple[int, ...] = ()
    """Forced tokens (teacher forcing): taken one a step instead of sampled ones, and reported like sampled ones. See
    ``forcing``. Only code of this process can ask for it."""

    constraint: Constraint | None = None
    """Constraint of the output, enforced by masks: excluded tokens get no probability, before everything else here
    applies. The reported log-probabilities stay those of the plain model."""
    thinking: Thinking | None = None
    """Reasoning that the output begins in. Without a budget or constraint it changes nothing."""

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, rule: str) -> None:
            if not ok:
                raise InvalidRequest(f"{name} must be {rule}, got {getattr(self, name)!r}", param=name)

        def within(name: str, low: float, high: float) -> None:
            value = getattr(self, name)
            check(name, math.isfinite(value) and low <= value <= high, f"between {low:g} and {high:g}")

        within("temperature", 0.0, 100.0)
        check("top_p", math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        check("top_k", self.top_k >= 0, "0 (off) or positive")
        within("min_p", 0.0, 1.0)
        within("presence_penalty", -2.0, 2.0)
        within("frequency_penalty", -2.0, 2.0)
        check(
            "repetition_penalty",
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0,
            "a positive number",
        )
        check("seed", self.seed is None or 0 <= self.seed < 2**64, "between 0 and 2**64 - 1")
        check("max_tokens", self.max_tokens >= 1, "at least 1")
        check("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens")
        check("top_logprobs", self.top_logprobs is None or 0 <= self.top_logprobs <= 20, "between 0 and 20")
        check(
            "logit_bias",
            all(math.isfinite(bias) and -100 <= bias <= 100 for bias in self.logit_bias.values()),
            "a map of token id to a bias between -100 and 100",
        )
        if self.forced_ids:
            self._check_forced()
        elif self.constraint is not None:
            self._check_constrained(self.constraint)
        if self.thinking is not None and self.thinking.end_token_id in self.stop_token_ids:
            raise InvalidRequest(
                f"stop_token_ids has {self.thinking.end_token_id}, which ends the reasoning: nothing would be answered",
                param="stop_token_ids",
            )

    @classmethod
    def forcing(cls, token_ids: tuple[int, ...], temperature: float) -> SamplingParams:
        """Parameters that force exactly these tokens and report how likely each was.

        Args:
            token_ids: at least one; the caller has checked that they are in the vocabulary.
            temperature: temperature of the distribution; 0 counts as 1, as for greedy tokens.
        """
        if not token_ids:
            raise InvalidRequest("forced_ids must not be empty", param="forced_ids")
        return cls(temperature=temperature, max_tokens=len(token_ids), ignore_eos=True, forced_ids=token_ids)

    @property
    def forces(self) -> bool:
        """True if the tokens are forced. Such a request is not repeated, so its cache entries are not saved."""
        return bool(self.forced_ids)

    def _check_forced(self) -> None:
        """Refuses parameters that have no effect on forced tokens."""
        if min(self.forced_ids) < 0:
            raise InvalidRequest(f"forced_ids has the token id {min(self.forced_ids)}", param="forced_ids")
        if not self.ignore_eos or self.max_tokens != len(self.forced_ids):
            raise InvalidRequest(
                f"{len(self.forced_ids)} forced_ids need ignore_eos and as many max_tokens, got {self.max_tokens}",
                param="forced_ids",
            )
        usual = SamplingParams()
        for setting in fields(self):
            name = setting.name
            if name not in _WITH_FORCED and getattr(self, name) != getattr(usual, name):
                raise InvalidRequest(f"{name} would do nothing: the tokens are given (forced_ids)", param=name)

    def _check_constrained(self, constraint: Constraint) -> None:
        """Refuses parameters that contradict a constraint, which decides where the output ends."""
        if self.min_tokens > 0:
            raise InvalidRequest(
                f"min_tokens cannot be combined with {constraint.param}: the outputs that it allows may be shorter",
                param="min_tokens",
            )
        if self.ignore_eos:
            raise InvalidRequest(
                f"ignore_eos cannot be combined with {constraint.param}: the output ends where nothing may follow",
                param="ignore_eos",
            )

    @property
    def masked(self) -> bool:
        """True if some tokens are sampled under a mask; the request then has an OutputMatcher."""
        return self.constraint is not None or (self.thinking is not None and self.thinking.budget is not None)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def stops(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end the output."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | eos_token_ids

    @property
    def draftable(self) -> bool:
        """True if draft tokens may be proposed. They are not proposed for forced tokens, which steps take one by one as
        the replayed ones were sampled, nor to requests with more stop tokens than a runner looks for itself."""
        return len(self.stop_token_ids) <= MOST_STOP_TOKENS and not self.forced_ids

    @property
    def penalises(self) -> bool:
        """True if logits depend on how often tokens came before."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)
