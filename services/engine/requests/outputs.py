"""What the scheduler tells the outside about a request after each step. No torch here."""

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
    """The next token of one sequence."""

    token_id: int
    sampling_logprob: float
    """log softmax(logits / temperature)[token]; temperature 1 for greedy."""
    logprob: float | None = None
    """log softmax(logits)[token], if the request asked for logprobs."""
    top_ids: SequenceABC[int] = ()
    top_logprobs: SequenceABC[float] = ()
    error: str | None = None
    """Set when the row's logits were NaN or infinite: the request ends with this error and token_id means nothing."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A request's whole answer, once it has ended for whatever reason."""

    request: Request
    output_ids: SequenceABC[int]
    """A stop token, if one was sampled, is the last."""
    sampling_logprobs: array[float]
    """float32, one per output token: log softmax(logits / temperature)[token]."""
    finish_reason: FinishReason
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    preemptions: int
    scheduled_at: float | None
    """When it first ran, in the loop's clock; None if it never did."""
    first_token_at: float | None
    cached_from: Tier | None = None
    """The tier that the cached tokens came from; None: the device had them."""
    saved_seconds: float = 0.0
    """What computing them would have taken, less the wait for the tier."""


class SequenceUpdate(NamedTuple):
    """What one step added to one request.

    The last update of a request, and only it, has a ``finish_reason``. ABORT: the client asked for it. ERROR: ``error``
    says why (DeadlineExceeded, a failed step, a request that was refused after it was queued).

    A named tuple because one is made for every token; see Chunk.
    """

    request_id: str
    token: SampledToken | None = None
    finish_reason: FinishReason | None = None
    error: TemperError | None = None
    cached_tokens: int | None = None
    """On the first update of a request that ran."""
    adapter: str | None = None
    """On the first update: the pinned version "name@n", empty for the base."""
    finished: Finished | None = None
    """On the last update of a request that the scheduler had."""
    prompt: PromptScores | None = None
    """Of the next tokens of the prompt. An update with this or an embedding has no token."""
    embedding: Floats | None = None
    """[hidden]: the vector of the prompt, in the update before the first token."""
    kept: bool = False
    """The request was ended with ``keep_tokens`` and its rollout is cut to them. Such an update has nothing else, and
    comes behind the last one."""
