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
"""Most ends of messages that a request may name."""
MOST_PROMPT_ALTERNATIVES = 128
"""Most alternatives that may be reported for each prompt token."""


class FinishReason(enum.Enum):
    """Reason why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenMatcher(Protocol):
    """Matcher of one request's constraint, advanced token by token. It is a Protocol because its implementation,
    constraints.matcher.OutputMatcher, is in a layer above this one."""

    def advance(self, token_id: int) -> bool:
        """Takes a token of the output; returns True if nothing more may follow."""
        ...


class Pooling(enum.Enum):
    """Pooling of a prompt's hidden states, after the final norm, into one vector."""

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Request:
    """Request as the scheduler gets it: tokens, sampling, and the adapter version already pinned."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    pin: AdapterPin = BASE_PIN
    deadline: float | None = None
    """Deadline on the loop's monotonic clock, seconds."""
    cache_salt: str = ""
    priority: int = 0
    """Priority; lower runs first."""
    arrival: int = 0
    """Order among requests of equal priority."""
    prompt_logprobs: int | None = None
    """Alternatives to report for each prompt token; None: prompt tokens are not scored."""
    prompt_logprobs_from: int = 0
    """First prompt token to score; 0 is the same as 1, because the first token has no score."""
    pooling: Pooling | None = None
    """Pooling of the prompt's vector; None: none is reported."""
    matcher: TokenMatcher | None = None
    """Matcher of this request alone; set if ``sampling.masked`` is."""
    traceparent: str = ""
    """Trace context of the caller's span; empty: it is not traced."""
    session: SessionName | None = None
    """Conversation session of the request; None: there is none."""
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
        """True if scores or a vector of the prompt are reported."""
        return self.prompt_logprobs is not None or self.pooling is not None


def check_prompt_logprobs(alternatives: int | None, first: int, prompt_tokens: int) -> None:
    """Raises InvalidRequest if the log-probabilities asked for cannot be reported."""
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
    """Raises InvalidRequest unless the boundaries ascend inside a prompt of so many tokens."""
    if len(boundaries) > MAX_BOUNDARIES:
        raise InvalidRequest(
            f"a prompt may have {MAX_BOUNDARIES} boundaries, it has {len(boundaries)}: send the last ones",
            param="boundaries",
        )
    if any(one >= other for one, other in pairwise((0, *boundaries, prompt))):
        raise InvalidRequest(
            f"boundaries must ascend and lie inside the prompt, between 0 and {prompt}", param="boundaries"
        )
