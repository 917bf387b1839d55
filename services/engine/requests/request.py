"""What the engine is asked to do: immutable requests and their sampling parameters. No torch here."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING

from services.common.errors import InvalidRequest
from services.engine.requests.sessions import SessionName
from services.engine.sampling_params import Constraint, Thinking

if TYPE_CHECKING:
    from services.engine.constraints.matcher import OutputMatcher

_WITH_FORCED = frozenset({"temperature", "max_tokens", "ignore_eos", "top_logprobs", "forced_ids"})
"""Settings that mean something where the tokens are given."""


MAX_BOUNDARIES = 4096
"""Ends of messages that a request may name."""
MOST_PROMPT_ALTERNATIVES = 128
"""Tokens that may be reported beside each one of a prompt."""


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Pooling(enum.Enum):
    """How the hidden states of a prompt, after the final norm, become one vector."""

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Defaults are OpenAI's.

    Raises:
        InvalidRequest: a value is out of range; ``param`` names it.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
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
    """None: no raw log-probabilities; 0: of the sampled token only."""
    forced_ids: tuple[int, ...] = ()
    """Teacher forcing: the tokens to take, one a step, where others would be drawn; what is said of them is what would
    be said of drawn ones. See ``forcing``. Nothing outside this process can ask for it."""

    constraint: Constraint | None = None
    """The language of the output, enforced by masks: what it excludes gets no probability, before everything else
    here applies. The log-probabilities that are reported stay those of the plain model."""
    thinking: Thinking | None = None
    """Where the reasoning ends that the output begins in. Alone, without a budget, it changes nothing."""

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
        """Takes exactly these tokens, whatever they are, and says how likely each was.

        Args:
            token_ids: at least one; the caller knows that they are of the vocabulary.
            temperature: of the distribution; 0 is that of 1, as for greedy tokens.
        """
        if not token_ids:
            raise InvalidRequest("forced_ids must not be empty", param="forced_ids")
        return cls(temperature=temperature, max_tokens=len(token_ids), ignore_eos=True, forced_ids=token_ids)

    @property
    def forces(self) -> bool:
        """Whether the tokens are given, not drawn. Whoever asks for that asks once."""
        return bool(self.forced_ids)

    def _check_forced(self) -> None:
        """Where nothing is chosen, a setting of the choice is refused, not ignored."""
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
        """An output of a language ends where the language says."""
        if self.min_tokens > 0:
            raise InvalidRequest(
                f"min_tokens cannot be combined with {constraint.param}: what it describes may be shorter",
                param="min_tokens",
            )
        if self.ignore_eos:
            raise InvalidRequest(
                f"ignore_eos cannot be combined with {constraint.param}: the output ends where nothing may follow",
                param="ignore_eos",
            )

    @property
    def masked(self) -> bool:
        """Whether an OutputMatcher goes with the request: some of its tokens are chosen under a mask."""
        return self.constraint is not None or (self.thinking is not None and self.thinking.budget is not None)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def guessable(self) -> bool:
        """Whether speculation may guess tokens ahead. Not given ones: steps take them one by one, as those they replay
        were sampled where nothing is guessed. Nor such as depend on a mask, which is made when the token before it is
        known."""
        return not self.edits_logits and not self.forced_ids and not self.masked

    @property
    def edits_logits(self) -> bool:
        """Whether logits depend on the output so far or are changed token by token: nothing is guessed for these."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0) or bool(self.logit_bias) or self.min_tokens > 0


@dataclass(frozen=True, slots=True)
class AdapterPin:
    """The immutable adapter version that answers one request.

    ``slot`` indexes the stacked LoRA buffers (0 is the base: no adapter). ``digest`` is part of every cache key, so
    that KV of one version is never reused for another; the base has the empty digest.
    """

    version: str = ""
    """"name@n", empty for the base."""
    digest: str = ""
    slot: int = 0

    def __post_init__(self) -> None:
        if (self.slot == 0) != (self.version == "") or (self.slot == 0) != (self.digest == ""):
            raise ValueError(f"slot 0 and only slot 0 is the base, got {self!r}")


BASE_PIN = AdapterPin()


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, as the scheduler gets it: tokens, sampling and the adapter version already pinned."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    pin: AdapterPin = BASE_PIN
    deadline: float | None = None
    """In the loop's monotonic clock, seconds."""
    cache_salt: str = ""
    priority: int = 0
    """Lower runs first."""
    arrival: int = 0
    """Ties of priority are served in this order."""
    prompt_logprobs: int | None = None
    """Alternatives to report beside each token of the prompt; None: nothing is said of them."""
    prompt_logprobs_from: int = 0
    """The first token of the prompt to report; 0 is 1: there is nothing to say of the very first."""
    pooling: Pooling | None = None
    """Report a vector of the prompt."""
    matcher: OutputMatcher | None = None
    """Of this request alone: what may follow the output so far. Goes with ``sampling.masked``."""
    traceparent: str = ""
    """Of the span that asks; empty: nobody traces it."""
    session: SessionName | None = None
    """Whose history this is; None: nobody's."""
    boundaries: tuple[int, ...] = ()
    """Positions in the prompt where a message ends and another may follow, ascending."""

    def __post_init__(self) -> None:
        if self.sampling.masked != (self.matcher is not None):
            raise ValueError(f"{self.request_id}: a matcher goes with a constraint or a thinking budget, and only so")
        if not self.request_id:
            raise InvalidRequest("request_id must not be empty", param="request_id")
        if not self.prompt_token_ids:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        check_prompt_logprobs(self.prompt_logprobs, self.prompt_logprobs_from, len(self.prompt_token_ids))
        check_boundaries(self.boundaries, len(self.prompt_token_ids))

    @property
    def reads_prompt(self) -> bool:
        """Whether something of the prompt itself is reported."""
        return self.prompt_logprobs is not None or self.pooling is not None


def check_prompt_logprobs(alternatives: int | None, first: int, prompt_tokens: int) -> None:
    """Raises InvalidRequest if log-probabilities of a prompt cannot be reported so."""
    if alternatives is not None and not 0 <= alternatives <= MOST_PROMPT_ALTERNATIVES:
        raise InvalidRequest(
            f"prompt_logprobs must be between 0 and {MOST_PROMPT_ALTERNATIVES}, got {alternatives}",
            param="prompt_logprobs",
        )
    if first and alternatives is None:
        raise InvalidRequest("prompt_logprobs_from needs prompt_logprobs", param="prompt_logprobs_from")
    if not 0 <= first < max(2, prompt_tokens):
        raise InvalidRequest(
            f"prompt_logprobs_from must be a place in the prompt of {prompt_tokens} tokens, got {first}",
            param="prompt_logprobs_from",
        )


def check_boundaries(boundaries: tuple[int, ...], prompt: int) -> None:
    """Raises InvalidRequest if these are no ends of messages inside a prompt of so many tokens."""
    if len(boundaries) > MAX_BOUNDARIES:
        raise InvalidRequest(
            f"a prompt may have {MAX_BOUNDARIES} boundaries, it has {len(boundaries)}: send the last ones",
            param="boundaries",
        )
    if any(one >= other for one, other in pairwise((0, *boundaries, prompt))):
        raise InvalidRequest(
            f"boundaries must ascend and lie inside the prompt, between 0 and {prompt}", param="boundaries"
        )
