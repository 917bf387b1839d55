"""Reward by a tournament: a judge compares the completions of one prompt with each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from services.common.adapters.composition import Published
from services.common.adapters.names import BASE
from services.common.jobs.fields.refs import FixedPolicy
from services.common.jobs.scorers.base import ScorerSpec
from services.common.jobs.scorers.grants import Grants
from services.common.jobs.scorers.judge import JudgeScorer, JudgeSpec
from services.common.jobs.scorers.sample import Reference, Sample


class TournamentReward(ScorerSpec):
    """Share of its comparisons with other completions of its prompt that a judge favours this one in, from 0 to 1, by
    the probabilities that it gives. Each pair is asked in both orders. No reference answer is needed."""

    type: Literal["tournament"] = "tournament"
    judge: FixedPolicy = BASE
    """"base", a version of an adapter, "name@n", or several together, "a@3*0.7+b@1"."""
    prompt: str | None = Field(None, min_length=1, max_length=20_000)
    """Question to the judge, with {question}, {first} and {second}. None: one of ours."""
    opponents: int | None = Field(None, ge=1)
    """Others that each completion is compared with; None: all of them. The number of questions is that times the
    completions."""

    @model_validator(mode="after")
    def _asks(self) -> TournamentReward:
        _ = self.pair  # its own checks
        return self

    @property
    def pair(self) -> JudgeSpec:
        """The judge of a pair."""
        return JudgeSpec(judge=self.judge, mode="pairwise", prompt=self.prompt)

    @property
    def version(self) -> Published | None:
        """The judge's version, or the composition of some; None: the base."""
        return self.pair.version

    def scorer(self, where: str, grants: Grants) -> TournamentScorer:
        """See SampleScorerSpec."""
        judge = self.pair.scorer(where, grants)
        return TournamentScorer(judge, self.opponents)


class TournamentScorer:
    """See TournamentReward."""

    def __init__(self, judge: JudgeScorer, opponents: int | None) -> None:
        self._judge = judge
        self._opponents = opponents

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        """See Scorer. Equal texts draw without a question, and so does a pair that the judge says nothing about; a
        completion without others scores 0.5."""
        groups: dict[str, list[int]] = {}
        for index, sample in enumerate(samples):
            groups.setdefault(sample.prompt, []).append(index)
        pairs = [pair for members in groups.values() for pair in self._pairs(members)]
        asked = [(one, two) for one, two in pairs if samples[one].text != samples[two].text]
        questions = [
            replace(samples[one], answer=None, reference=Reference(expected=(samples[two].text,))) for one, two in asked
        ]
        found = self._judge.judgements(questions, interrupt)
        wins = {
            pair: judgement.score if judgement.reason is None else 0.5
            for pair, judgement in zip(asked, found, strict=True)
        }
        played: list[list[float]] = [[] for _ in samples]
        for one, two in pairs:
            share = wins.get((one, two), 0.5)
            played[one].append(share)
            played[two].append(1 - share)
        return [sum(shares) / len(shares) if shares else 0.5 for shares in played]

    def _pairs(self, members: Sequence[int]) -> list[tuple[int, int]]:
        """Pairs of a group: all, or those of neighbours in a ring, so that each plays as many. An odd one is played
        across the ring; in a ring of odd size one member has no such opponent."""
        count = len(members)
        if self._opponents is None or self._opponents >= count - 1:
            return [(members[one], members[two]) for one in range(count) for two in range(one + 1, count)]
        apart = range(1, self._opponents // 2 + 1)
        ring = {tuple(sorted((at, (at + step) % count))) for step in apart for at in range(count)}
        if self._opponents % 2:
            ring |= {(at, at + count // 2) for at in range(count // 2)}
        return [(members[one], members[two]) for one, two in sorted(ring)]
