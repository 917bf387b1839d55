"""Scores of a shard's answers, by the scorer of the suite."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.common.adapters.names import BASE, parse_adapter_version
from services.common.errors import InvalidRequest
from services.common.evaluation.runs.records import Answer, ItemResult
from services.common.evaluation.suites.scoring import item_score, sample_scores
from services.common.evaluation.suites.spec import SuiteItem, SuiteSampling, SuiteSettings
from services.common.jobs.scorers.base import SampleScorerSpec
from services.common.jobs.scorers.grants import Grants
from services.common.jobs.scorers.of_suites.judge import JudgeQuestion, JudgeSpec
from services.common.jobs.scorers.of_suites.likelihood import ChoiceSpec, PerplexitySpec
from services.common.jobs.scorers.sample import Sample
from services.common.text.tokenizer import TextCodec
from services.trainer.evaluation.questions import Question, question_of
from services.trainer.evaluation.targets import Continuation, Said, Target
from services.trainer.host.rollouts import Policy, RolloutSource, ScoreRequest

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
        rollouts: RolloutSource,
        codec: TextCodec,
        grants: Grants,
        where: str,
    ) -> None:
        self._settings = settings
        self._sampling = sampling
        self._rollouts = rollouts
        self._codec = codec
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
        if isinstance(self._spec, JudgeSpec):
            grades = iter(self._judged(self._spec, asked, interrupt))
        else:
            grades = iter(self._scored(asked, interrupt))
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

    def _scored(self, asked: Sequence[tuple[SuiteItem, Said]], interrupt: Interrupt) -> list[_Grade]:
        if self._scorer is None:
            raise RuntimeError(f"the {self._spec.name} scorer does not score samples")
        scores = sample_scores(self._scorer, [_sample(item, one) for item, one in asked], interrupt)
        return [self._grade(score, one) for score, (_, one) in zip(scores, asked, strict=True)]

    def _grade(self, score: float, said: Said) -> _Grade:
        """An answer without anything to read is invalid, unless it is what was asked for."""
        if score > 0 or said.tool_calls or self._vote(said.text) is not None:
            return _Grade(score, valid=True)
        return _Grade(0.0, valid=False, reason=f"the {self._spec.name} scorer finds no answer in it")

    def _judged(self, spec: JudgeSpec, asked: Sequence[tuple[SuiteItem, Said]], interrupt: Interrupt) -> list[_Grade]:
        policy: Policy = None if spec.judge == BASE else parse_adapter_version(spec.judge)
        questions = [
            spec.questions(question_of(self._settings, item).asked, one.text, item.reference) for item, one in asked
        ]
        requests: list[ScoreRequest] = []
        grades: dict[int, _Grade] = {}
        for place, several in enumerate(questions):
            try:
                requests += self._verdict_requests(several)
            except InvalidRequest as error:
                grades[place] = _Grade(0.0, valid=False, reason=f"the judge cannot be asked: {error.message}")
        found = iter(self._rollouts.likelihoods(requests, policy, interrupt=interrupt) if requests else ())
        for place, several in enumerate(questions):
            if place not in grades:
                chances: list[Mapping[str, float]] = [
                    {verdict: next(found) for verdict in question.verdicts} for question in several
                ]
                judgement = spec.judgement(chances)
                reason = None if judgement.valid else "the judge says none of its verdicts"
                grades[place] = _Grade(round(judgement.score, _DIGITS), judgement.valid, reason)
        return [grades[place] for place in range(len(questions))]

    def _verdict_requests(self, questions: Sequence[JudgeQuestion]) -> list[ScoreRequest]:
        found = []
        for question in questions:
            asked = Question(question.prompt, ({"role": "user", "content": question.prompt},))
            prompt = asked.tokens(self._codec)
            for verdict in question.verdicts:
                tokens = asked.continuation(self._codec, verdict)
                self._rollouts.check(len(prompt) + len(tokens), 1)
                found.append(ScoreRequest(prompt, tokens, 1.0))
        return found

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


def _sample(item: SuiteItem, said: Said) -> Sample:
    return Sample(
        prompt=said.prompt,
        completion=said.whole,
        tokens=said.tokens,
        truncated=said.finish_reason == "length",
        metadata=item.metadata,
        said=said.text,
        tool_calls=said.tool_calls,
        reference=item.reference,
    )


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
