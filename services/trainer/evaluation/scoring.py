"""Scores of a shard's answers, by the scorer of the suite."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.common.errors import InvalidRequest
from services.common.evaluation.runs.records import Answer, ItemResult
from services.common.evaluation.suites.scoring import item_score, sample_scores
from services.common.evaluation.suites.spec import SuiteItem, SuiteSampling, SuiteSettings
from services.common.jobs.scorers.base import SampleScorerSpec
from services.common.jobs.scorers.grants import Grants
from services.common.jobs.scorers.judge import JudgeScorer
from services.common.jobs.scorers.of_suites.likelihood import ChoiceSpec, PerplexitySpec
from services.common.jobs.scorers.sample import Sample
from services.trainer.evaluation.questions import question_of
from services.trainer.evaluation.targets import Continuation, Said, Target

_DIGITS = 5
"""Digits of a judge's score behind the point: which requests shared a step, which moves the last bits, is no part of a
result."""
Interrupt = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Grade:
    """Score of one answer."""

    score: float
    valid: bool
    reason: str | None = None


class SuiteGrader:
    """Grades answers as a suite says.

    Args:
        where: place of the suite in the job, for messages.

    Raises:
        InvalidRequest: the scorer cannot be used.
    """

    def __init__(
        self,
        settings: SuiteSettings,
        sampling: SuiteSampling,
        grants: Grants,
        where: str,
    ) -> None:
        self._settings = settings
        self._sampling = sampling
        self._spec = settings.scorer
        self._scorer = self._spec.scorer(where, grants) if isinstance(self._spec, SampleScorerSpec) else None

    @property
    def samples(self) -> bool:
        """Whether the scorer reads answers; otherwise it reads log-likelihoods."""
        return not isinstance(self._spec, ChoiceSpec | PerplexitySpec)

    def graded(
        self, first: int, items: Sequence[SuiteItem], said: Sequence[Sequence[Said]], interrupt: Interrupt
    ) -> list[ItemResult]:
        """Results of items with their answers.

        Args:
            first: place of the first item in the suite.
            said: of each item the answers.

        Raises:
            Unavailable: a webhook failed, also when asked again; and what ``interrupt`` raises.
        """
        pairs = [(item, one) for item, several in zip(items, said, strict=True) for one in several]
        asked = [(item, one) for item, one in pairs if one.error is None]
        samples = [self._sample(item, one) for item, one in asked]
        if isinstance(self._scorer, JudgeScorer):
            grades = iter(self._judged(self._scorer, samples, interrupt))
        else:
            grades = iter(self._scored(asked, samples, interrupt))
        results = []
        for place, (item, several) in enumerate(zip(items, said, strict=True)):
            found = [
                next(grades) if one.error is None else _Grade(0.0, valid=False, reason=one.error) for one in several
            ]
            answers = tuple(_answer(one, grade) for one, grade in zip(several, found, strict=True))
            votes = [self._vote(one.text) if grade.valid else None for one, grade in zip(several, found, strict=True)]
            score = item_score(self._sampling, [grade.score for grade in found], votes)
            results.append(_result(first + place, item, score, item.weight, answers))
        return results

    def _vote(self, text: str) -> object:
        return self._spec.vote(text) if isinstance(self._spec, SampleScorerSpec) else text

    def _scored(
        self, asked: Sequence[tuple[SuiteItem, Said]], samples: Sequence[Sample], interrupt: Interrupt
    ) -> list[_Grade]:
        if self._scorer is None:
            raise RuntimeError(f"the {self._spec.name} scorer does not score samples")
        scores = sample_scores(self._scorer, samples, interrupt)
        return [self._grade(score, one) for score, (_, one) in zip(scores, asked, strict=True)]

    def _grade(self, score: float, said: Said) -> _Grade:
        """An answer without anything to read is invalid, unless it is what was asked for."""
        if score > 0 or said.tool_calls or self._vote(said.text) is not None:
            return _Grade(score, valid=True)
        return _Grade(0.0, valid=False, reason=f"the {self._spec.name} scorer finds no answer in it")

    def _sample(self, item: SuiteItem, said: Said) -> Sample:
        return Sample(
            prompt=said.prompt,
            completion=said.whole,
            tokens=said.tokens,
            truncated=said.finish_reason == "length",
            question=question_of(self._settings, item).asked,
            metadata=item.metadata,
            said=said.text,
            tool_calls=said.tool_calls,
            reference=item.reference,
        )

    def _judged(self, judge: JudgeScorer, samples: Sequence[Sample], interrupt: Interrupt) -> list[_Grade]:
        return [
            _Grade(round(found.score, _DIGITS), valid=found.reason is None, reason=found.reason)
            for found in judge.judgements(samples, interrupt)
        ]

    def read(self, first: int, items: Sequence[SuiteItem], target: Target, interrupt: Interrupt) -> list[ItemResult]:
        """Results of items that are scored by a target's log-likelihoods.

        Raises:
            InvalidRequest: an item does not fit the target, or this gives no log-likelihoods; the item is named.
        """
        spec = self._spec
        if not isinstance(spec, ChoiceSpec | PerplexitySpec):
            raise RuntimeError(f"the {spec.name} scorer reads no log-likelihoods")
        texts = [spec.continuations(item.reference) for item in items]
        asked = [
            Continuation(item.id, question_of(self._settings, item), text)
            for item, several in zip(items, texts, strict=True)
            for text in several
        ]
        values = iter(target.likelihoods(asked, interrupt))
        results = []
        for place, (item, several) in enumerate(zip(items, texts, strict=True)):
            likelihoods = [next(values) for _ in several]
            verdict = spec.verdict(item.reference, likelihoods)
            answer = Answer(
                text="",
                score=verdict.score,
                tokens=sum(one.tokens for one in likelihoods),
                finish_reason="none",
                logprobs=tuple(one.logprob for one in likelihoods),
            )
            results.append(_result(first + place, item, verdict.score, item.weight * verdict.weight, (answer,)))
        return results


def _answer(said: Said, grade: _Grade) -> Answer:
    calls = tuple(
        json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False) for call in said.tool_calls
    )
    return Answer(
        text=said.text,
        score=grade.score,
        valid=grade.valid,
        tokens=said.tokens,
        finish_reason=said.finish_reason,
        reason=grade.reason,
        tool_calls=calls,
    )


def _result(index: int, item: SuiteItem, score: float, weight: float, answers: tuple[Answer, ...]) -> ItemResult:
    if not math.isfinite(score):
        raise InvalidRequest(f"item {item.id[:80]!r}: its score is {score}", param="suites")
    return ItemResult(item=item.id, index=index, score=score, weight=weight, group=item.group, answers=answers)
