"""What a step tells of a prompt itself: log-probabilities of its tokens, and a vector of its hidden states.

Row p of a prompt (the hidden state behind its token p) says how likely token p + 1 was. Of a request that asks for such
things each of these rows is read exactly once, in order, by whatever chunks compute them: ``Reading`` remembers how far
the plans have come, so that of a preempted prompt, which is computed again, nothing is told twice. No torch here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.engine.requests.request import Pooling, Request

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class PromptRead(NamedTuple):
    """What the runner reads of one chunk."""

    chunk: int
    """Its place in the plan."""
    begin: int
    """First position of the prompt whose row is read."""
    end: int
    """Behind the last one."""


class PromptScores(NamedTuple):
    """How likely consecutive tokens of a prompt were, each after those before it."""

    logprobs: Floats
    """[N]: log softmax(logits)[token] of the plain model."""
    ranks: Ints
    """[N]: 1 if no other token was likelier."""
    top_ids: Ints
    """[N, k], most likely first."""
    top_logprobs: Floats
    """[N, k]."""


class PromptReport(NamedTuple):
    """What a step read of one prompt."""

    scores: PromptScores | None
    """None: of no token."""
    pooled: Floats | None
    """[hidden]: the sum of the rows that belong to the vector; None: none does."""

    @property
    def finite(self) -> bool:
        """False where the model produced NaN or infinity."""
        scored = self.scores is None or bool(np.isfinite(self.scores.logprobs).all())
        return scored and (self.pooled is None or bool(np.isfinite(self.pooled).all()))


class PromptProgress:
    """How far the rows of one prompt are planned to be read, and the vector as far as it is known."""

    __slots__ = ("_end", "_next", "_request", "_total")

    def __init__(self, request: Request) -> None:
        length = len(request.prompt_token_ids)
        self._request = request
        self._total: Floats | None = None
        self._end = length if request.pooling is not None else length - 1
        """Rows to read end here."""
        self._next = length - 1
        """The first one that no plan reads yet."""
        if request.pooling is Pooling.MEAN:
            self._next = 0
        elif request.prompt_logprobs is not None:
            self._next = first_scored_row(request)

    @classmethod
    def of(cls, request: Request) -> PromptProgress | None:
        """None for a request that asks for nothing of its prompt."""
        return cls(request) if request.reads_prompt else None

    @property
    def reusable(self) -> int:
        """Tokens at the beginning of the prompt that need not be computed where their state is known."""
        if self._next >= self._end:
            return len(self._request.prompt_token_ids)
        return 0 if self._request.pooling is not None else self._next

    def take(self, start: int, end: int) -> tuple[int, int] | None:
        """The rows to read of a chunk that computes [start, end), if any; from then on they count as read."""
        begin, stop = max(start, self._next), min(end, self._end)
        if begin >= stop:
            return None
        self._next = stop
        return begin, stop

    def vector(self, pooled: Floats, read: PromptRead) -> Floats | None:
        """Adds what a step summed up; the request's vector once the last row is in it. Steps end in the order of their
        plans."""
        self._total = pooled if self._total is None else self._total + pooled
        if read.end < self._end:
            return None
        count = self._end if self._request.pooling is Pooling.MEAN else 1
        return self._total / np.float32(count)


def first_scored_row(request: Request) -> int:
    """Of a request for log-probabilities: the row that says how likely the first token is that it wants to know of."""
    return max(0, request.prompt_logprobs_from - 1)
