"""Outputs of the scheduler: the updates of a request after each step. No torch here."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import NamedTuple

from services.common.errors import TemperError
from services.engine.kv_cache.keys import Tier
from services.engine.requests.prompt_scoring import Floats, PromptScores
from services.engine.requests.request import FinishReason, Request


class SampledToken(NamedTuple):
    """Sampled token of one sequence."""

    token_id: int
    sampling_logprob: float
    """Log-probability log softmax(logits / temperature)[token]; temperature 1 for greedy."""
    logprob: float | None = None
    """Log-probability log softmax(logits)[token], if the request asked for logprobs."""
    top_ids: SequenceABC[int] = ()
    top_logprobs: SequenceABC[float] = ()
    error: str | None = None
    """Error, set if the row's logits were NaN or infinite: the request ends with it, and token_id means nothing."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Whole answer of a request that has ended for whatever reason."""

    request: Request
    output_ids: SequenceABC[int]
    """Output tokens; a sampled stop token is the last one."""
    sampling_logprobs: array[float]
    """Log-probabilities log softmax(logits / temperature)[token], float32, one per output token."""
    finish_reason: FinishReason
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    preemptions: int
    scheduled_at: float | None
    """Time of its first step, on the loop's clock; None: it never ran."""
    first_token_at: float | None
    cached_from: Tier | None = None
    """Tier that the cached tokens came from; None: the device had them."""
    saved_seconds: float = 0.0
    """Time that computing the cached tokens would have taken, less the wait for the tier."""


class SequenceUpdate(NamedTuple):
    """Update of one request by one step.

    The last update of a request, and only it, has a ``finish_reason``. ABORT: the client asked for it. ERROR: ``error``
    says why (DeadlineExceeded, a failed step, a request that was refused after it was queued).

    A named tuple because one is made for every token; see Chunk.
    """

    request_id: str
    token: SampledToken | None = None
    finish_reason: FinishReason | None = None
    error: TemperError | None = None
    cached_tokens: int | None = None
    """Cached prompt tokens, on the first update of a request that ran."""
    adapter: str | None = None
    """Pinned version "name@n", empty for the base; on the first update."""
    finished: Finished | None = None
    """Whole answer, on the last update of a request that the scheduler had."""
    prompt: PromptScores | None = None
    """Scores of the next prompt tokens. An update with this or an embedding has no token."""
    embedding: Floats | None = None
    """[hidden] vector of the prompt, in the update before the first token."""
    kept: bool = False
    """True if the request was ended with ``keep_tokens`` and its rollout is cut to them. Such an update has nothing
    else and follows the last one."""
