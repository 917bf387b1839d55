"""Request: one generation as the scheduler gets it, immutable. No torch here."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from services.common.errors import InvalidRequest
from services.engine.requests.adapter import BASE_PIN, AdapterPin
from services.engine.requests.conversation_session import SessionName
from services.engine.requests.sampling_params import SamplingParams

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


class TokenMatcher(Protocol):
    """Constraint of one request, followed token by token. constraints.matcher.OutputMatcher is one; it lies above."""

    def advance(self, token_id: int) -> bool:
        """Takes in a token of the output; returns whether nothing more may follow."""
        ...


class Pooling(enum.Enum):
    """How the hidden states of a prompt, after the final norm, become one vector."""

    LAST = "last"
    MEAN = "mean"


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
    matcher: TokenMatcher | None = None
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
