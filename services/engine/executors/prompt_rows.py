"""Rows of a batch that score or pool prompts, gathered from the prompt reads of a step plan. No torch here."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.engine.requests.prompt_scoring import Floats, PromptRead, PromptReport, PromptScores, first_scored_row
from services.engine.requests.request import Pooling
from services.engine.scheduler.step_plan import Chunk


@dataclass(frozen=True, slots=True)
class ReadRows:
    """The rows of a batch that a plan reads, one read behind the other."""

    rows: npt.NDArray[np.int32]
    """[N]: those whose logits are looked at."""
    targets: npt.NDArray[np.int32]
    """[N]: the token behind each."""
    counts: SequenceABC[int]
    """Number of rows of each read."""
    alternatives: SequenceABC[int]
    """Number of likeliest tokens that each read wants."""
    pooled: SequenceABC[tuple[int, int]]
    """[M]: rows to sum up for each vector, as (begin, end)."""
    vectors: SequenceABC[int]
    """Index of the vector, of M, that each read has; -1 for none."""

    @classmethod
    def of(cls, reads: SequenceABC[PromptRead], chunks: SequenceABC[Chunk], offsets: SequenceABC[int]) -> ReadRows:
        """Args: offsets: of each chunk, the row of the batch that its first token is."""
        rows: list[npt.NDArray[np.int32]] = []
        targets: list[int] = []
        counts: list[int] = []
        alternatives: list[int] = []
        pooled: list[tuple[int, int]] = []
        vectors: list[int] = []
        for place, begin, end in reads:
            request = chunks[place].request
            prompt, offset = request.prompt_token_ids, offsets[place] - chunks[place].start
            scored = range(0)
            if request.prompt_logprobs is not None:
                scored = range(max(begin, first_scored_row(request)), min(end, len(prompt) - 1))
            rows.append(np.arange(offset + scored.start, offset + scored.stop, dtype=np.int32))
            targets += prompt[scored.start + 1 : scored.stop + 1]
            counts.append(len(scored))
            alternatives.append(request.prompt_logprobs or 0)
            wanted = request.pooling is Pooling.MEAN or (request.pooling is Pooling.LAST and end == len(prompt))
            vectors.append(len(pooled) if wanted else -1)
            if wanted:
                pooled.append((offset + (begin if request.pooling is Pooling.MEAN else end - 1), offset + end))
        return cls(np.concatenate(rows), np.array(targets, dtype=np.int32), counts, alternatives, pooled, vectors)

    @property
    def most_alternatives(self) -> int:
        return max((k for k, count in zip(self.alternatives, self.counts, strict=True) if count), default=0)

    def reports(self, scores: PromptScores, vectors: Floats) -> list[PromptReport]:
        """Reports, one for each read.

        Args:
            scores: of all rows, with most_alternatives or as many as there are tokens.
            vectors: [M, hidden].
        """
        made: list[PromptReport] = []
        begin = 0
        for count, k, vector in zip(self.counts, self.alternatives, self.vectors, strict=True):
            part = slice(begin, begin + count)
            own = None
            if count:
                own = PromptScores(
                    scores.logprobs[part], scores.ranks[part], scores.top_ids[part, :k], scores.top_logprobs[part, :k]
                )
            made.append(PromptReport(own, None if vector < 0 else vectors[vector]))
            begin += count
        return made
