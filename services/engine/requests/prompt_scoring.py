"""Prompt scoring: log-probabilities of a prompt's tokens, and a vector of its hidden states. No torch here.

Row p of a prompt (the hidden state behind its token p) gives the probability of token p + 1. For a request that asks
for such outputs each row is read exactly once, in order, by whichever chunks compute them. ``PromptProgress`` records
how far the plans have come, so a preempted prompt, which is computed again, reports nothing twice.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.engine.requests.request import Pooling, Request

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class PromptRead(NamedTuple):
    """Rows that the runner reads of one chunk."""

    chunk: int
    """Index of the chunk in the plan."""
    begin: int
    """First prompt position whose row is read."""
    end: int
    """Position behind the last one that is read."""


class PromptScores(NamedTuple):
    """Scores of consecutive prompt tokens, each given those before it."""

    logprobs: Floats
    """[N] log-probabilities log softmax(logits)[token] of the plain model."""
    ranks: Ints
    """[N] ranks; 1 if no other token was likelier."""
    top_ids: Ints
    """[N, k] alternatives, most likely first."""
    top_logprobs: Floats
    """[N, k] log-probabilities of the alternatives."""


class PromptReport(NamedTuple):
    """Report of one prompt by one step."""

    scores: PromptScores | None
    """Scores of prompt tokens; None: there are none."""
    pooled: Floats | None
    """[hidden] sum of the rows that belong to the vector; None: none does."""

    @property
    def finite(self) -> bool:
        """False where the model produced NaN or infinity."""
        scored = self.scores is None or bool(np.isfinite(self.scores.logprobs).all())
        return scored and (self.pooled is None or bool(np.isfinite(self.pooled).all()))


class PromptProgress:
    """Progress of reading one prompt: the rows that plans have read, and the partial sum of its vector."""

    __slots__ = ("_end", "_next", "_request", "_total")

    def __init__(self, request: Request) -> None:
        length = len(request.prompt_token_ids)
        self._request = request
        self._total: Floats | None = None
        self._end = length if request.pooling is not None else length - 1
        """End of the rows to read."""
        self._next = length - 1
        """First row that no plan reads yet."""
        if request.pooling is Pooling.MEAN:
            self._next = 0
        elif request.prompt_logprobs is not None:
            self._next = first_scored_row(request)

    @classmethod
    def of(cls, request: Request) -> PromptProgress | None:
        """Progress for a request; None if it asks for nothing of its prompt."""
        return cls(request) if request.reads_prompt else None

    @property
    def reusable(self) -> int:
        """Tokens at the beginning of the prompt that may come from the cache."""
        if self._next >= self._end:
            return len(self._request.prompt_token_ids)
        return 0 if self._request.pooling is not None else self._next

    def take(self, start: int, end: int) -> tuple[int, int] | None:
        """Rows to read of a chunk that computes [start, end), which then count as read; None: there are none."""
        begin, stop = max(start, self._next), min(end, self._end)
        if begin >= stop:
            return None
        self._next = stop
        return begin, stop

    def vector(self, pooled: Floats, read: PromptRead) -> Floats | None:
        """Adds the sum of a step's rows; returns the request's vector once the last row is in it. Steps end in the
        order of their plans."""
        self._total = pooled if self._total is None else self._total + pooled
        if read.end < self._end:
            return None
        count = self._end if self._request.pooling is Pooling.MEAN else 1
        return self._total / np.float32(count)


def first_scored_row(request: Request) -> int:
    """Row that scores the first prompt token which a request asks for."""
    return max(0, request.prompt_logprobs_from - 1)
