"""Prompt scores of the toy model: functions of the tokens so far, so that a wrong row gives a wrong number."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from services.engine.executors.prompt_rows import ReadRows
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.prompt_scoring import PromptReport, PromptScores
from services.engine.requests.request import Pooling, Request
from services.engine.scheduler.step_plan import StepPlan

WIDTH = 3


def logprob(history: tuple[int, ...], token: int) -> float:
    return -(1 + hash((history, token)) % 1000) / 8


def rank(history: tuple[int, ...], token: int) -> int:
    return 1 + hash((history, token, 1)) % 50


def top(history: tuple[int, ...], count: int) -> list[int]:
    return [hash((history, place, 2)) % 50 for place in range(count)]


def hidden(history: tuple[int, ...]) -> list[float]:
    return [float(hash((history, place, 3)) % 64) for place in range(WIDTH)]


def toy_reports(plan: StepPlan, states: Mapping[int, tuple[tuple[str, str], tuple[int, ...]]]) -> list[PromptReport]:
    """Reports of a plan that has just run. Fails if a read is not of its chunk or of its prompt."""
    offsets, histories = [], []
    for chunk in plan.chunks:
        offsets.append(len(histories))
        _, known = states[chunk.slot]
        histories += [known[: chunk.start + place + 1] for place in range(len(chunk.token_ids))]
    for read in plan.reads:
        chunk = plan.chunks[read.chunk]
        assert chunk.request.reads_prompt
        assert chunk.start <= read.begin < read.end <= chunk.start + len(chunk.token_ids)
        assert read.end <= len(chunk.request.prompt_token_ids)
    if not plan.reads:
        return []
    wanted = ReadRows.of(plan.reads, plan.chunks, offsets)
    pairs = [(histories[row], int(target)) for row, target in zip(wanted.rows, wanted.targets, strict=True)]
    k = wanted.most_alternatives
    scores = PromptScores(
        np.array([logprob(*pair) for pair in pairs], dtype=np.float32),
        np.array([rank(*pair) for pair in pairs], dtype=np.int32),
        np.array([top(history, k) for history, _ in pairs], dtype=np.int32).reshape(len(pairs), k),
        np.array([[-1.0 - place for place in range(k)] for _ in pairs], dtype=np.float32).reshape(len(pairs), k),
    )
    sums = [np.sum([hidden(histories[row]) for row in range(*rows)], axis=0) for rows in wanted.pooled]
    return wanted.reports(scores, np.array(sums, dtype=np.float32).reshape(-1, WIDTH))


class Told:
    """Prompt scores in the updates of one request."""

    def __init__(self, asked: Request) -> None:
        self._asked = asked
        self.logprobs: list[float] = []
        self.ranks: list[int] = []
        self.tops: list[list[int]] = []
        self.vector: npt.NDArray[np.float32] | None = None
        self.tokens = 0

    def add(self, update: SequenceUpdate) -> None:
        self.tokens += update.token is not None
        if update.prompt is not None:
            assert not self.tokens, "the prompt after its answer"
            assert len(update.prompt.logprobs)
            self.logprobs += update.prompt.logprobs.tolist()
            self.ranks += update.prompt.ranks.tolist()
            self.tops += update.prompt.top_ids.tolist()
        if update.embedding is not None:
            assert self.vector is None
            assert not self.tokens
            self.vector = update.embedding

    def check(self) -> None:
        """All of it, each once and in order; to be called when the first token is there."""
        asked, prompt = self._asked, self._asked.prompt_token_ids
        places = range(0)
        if asked.prompt_logprobs is not None:
            places = range(max(1, asked.prompt_logprobs_from), len(prompt))
        assert self.logprobs == [logprob(prompt[:place], prompt[place]) for place in places]
        assert self.ranks == [rank(prompt[:place], prompt[place]) for place in places]
        assert self.tops == [top(prompt[:place], asked.prompt_logprobs or 0) for place in places]
        if asked.pooling is None:
            assert self.vector is None
            return
        rows = [hidden(prompt[: place + 1]) for place in range(len(prompt))]
        assert self.vector is not None
        expected = rows[-1] if asked.pooling is Pooling.LAST else np.sum(rows, axis=0, dtype=np.float32) / len(rows)
        np.testing.assert_allclose(self.vector, expected, rtol=1e-6)
