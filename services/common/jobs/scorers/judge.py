"""Scorer by a judge: a version of an adapter, several together, or the base, reads the answer and says a verdict.

The engine beside the trainer is asked the `questions` and gives back, of each, the log-probabilities of its verdicts;
the score is what the verdicts are worth, by the probability that the judge gives each. Pairs are asked in both orders,
because judges favour a position (Zheng et al., arXiv 2306.05685).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from services.common.adapters.composition import Published, parse_policy
from services.common.adapters.names import BASE
from services.common.errors import InvalidRequest
from services.common.jobs.fields.refs import FixedPolicy
from services.common.jobs.scorers.base import ScorerSpec
from services.common.jobs.scorers.grants import AskJudge, Grants, JudgeQuestion, JudgeReply
from services.common.jobs.scorers.sample import Sample
from services.common.validation.json_rules import Rule, Rules, either, has, only_with

FIRST, SECOND = "A", "B"
LEAST_MASS = 0.5
"""Probability of all verdicts together below which a judge has answered something else."""
_FIELDS = ("question", "answer", "expected")
_PAIR_FIELDS = ("question", "first", "second")
_RUBRIC = (
    "Rate the answer to the question from 1 (wrong or useless) to 5 (right and complete).\n\n"
    "Question:\n{question}\n\nAnswer:\n{answer}\n\nSay the number only."
)
_PAIR = (
    "Which answer to the question is better?\n\nQuestion:\n{question}\n\n"
    "Answer A:\n{first}\n\nAnswer B:\n{second}\n\nSay A or B only."
)
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, slots=True)
class Judgement:
    """Score of an answer by a judge."""

    score: float
    """0 where the judge answered something else: an answer that nobody judged is not left out."""
    reason: str | None = None
    """Reason why it is no judgement: the judge cannot be asked, or answered something else. None: it is one."""
    agrees: bool = True
    """Whether both orders of a pair favour the same answer."""


class JudgeSpec(ScorerSpec):
    """Score of an answer by a judge, from 0 to 1.

    rubric: the judge rates each answer. pairwise: it says which of two answers is better, the answer or the one that is
    expected (the first, if a suite's item has several), in both orders; the score is the probability that it favours
    the answer.
    """

    type: Literal["judge"] = "judge"
    judge: FixedPolicy = BASE
    """"base", a version of an adapter, "name@n", or several together, "a@3*0.7+b@1"."""
    mode: Literal["rubric", "pairwise"] = "rubric"
    prompt: str | None = Field(None, min_length=1, max_length=20_000)
    """Question to the judge. rubric: with {question}, {answer} and, if wanted, {expected}; pairwise: with {question},
    {first} and {second}. None: one of ours."""
    verdicts: dict[str, Annotated[float, Field(ge=0, le=1)]] | None = Field(
        None, min_length=2, max_length=100, json_schema_extra={"propertyNames": {"pattern": r"^\S([\s\S]*\S)?$"}}
    )
    """rubric: what the judge may say, with what each is worth. None: 1 to 5, worth 0 to 1."""

    json_rules: ClassVar[Rules] = (only_with("verdicts", has(mode="rubric")),)
    compares: ClassVar[Rule | None] = either(
        has(type="judge", mode="pairwise"), has(type="judge", prompt={"type": "string", "pattern": "\\{expected\\}"})
    )

    @model_validator(mode="after")
    def _consistent(self) -> JudgeSpec:
        if self.verdicts is not None and self.mode == "pairwise":
            raise ValueError(
                'verdicts would do nothing here: a pair is answered with A or B, only mode "rubric" reads it'
            )
        if any(not verdict.strip() or verdict != verdict.strip() for verdict in self.verdicts or ()):
            raise ValueError("verdicts must be words without white space around them")
        if self.prompt is not None:
            known = _FIELDS if self.mode == "rubric" else _PAIR_FIELDS
            needed = {"answer"} if self.mode == "rubric" else {"first", "second"}
            found = set(_PLACEHOLDER.findall(self.prompt))
            for name in sorted(found - set(known)):
                raise ValueError(f"prompt has {{{name}}}, and may have {', '.join(f'{{{one}}}' for one in known)}")
            for name in sorted(needed - found):
                raise ValueError(f"prompt must have {{{name}}}")
        return self

    @property
    def worth(self) -> Mapping[str, float]:
        """Verdicts with what each is worth."""
        if self.mode == "pairwise":
            return {FIRST: 1.0, SECOND: 0.0}
        return self.verdicts or {str(mark): (mark - 1) / 4 for mark in range(1, 6)}

    @property
    def needs_answer(self) -> bool:
        """See ScorerSettings."""
        return self.mode == "pairwise" or "{expected}" in (self.prompt or "")

    @property
    def version(self) -> Published | None:
        """The judge's version, or the composition of some; None: the base."""
        return parse_policy(self.judge)

    def scorer(self, where: str, grants: Grants) -> JudgeScorer:
        """See SampleScorerSpec."""
        if grants.judge is None:
            raise InvalidRequest(f"{where}: no engine answers as a judge here", param=where)
        return JudgeScorer(self, grants.judge)

    def questions(self, sample: Sample) -> list[JudgeQuestion]:
        """Questions about one answer: one, or two for a pair, in both orders."""
        expected = sample.reference.expected[0] if sample.reference.expected else sample.answer or ""
        verdicts = tuple(self.worth)
        if self.mode == "rubric":
            values = {"question": sample.question, "answer": sample.text, "expected": expected}
            return [JudgeQuestion(_filled(self.prompt or _RUBRIC, values), verdicts)]
        return [
            JudgeQuestion(
                _filled(self.prompt or _PAIR, {"question": sample.question, "first": one, "second": other}), verdicts
            )
            for one, other in ((sample.text, expected), (expected, sample.text))
        ]

    def judgement(self, replies: Sequence[JudgeReply]) -> Judgement:
        """Judgement by the replies to ``questions``, in their order."""
        refused = next((reply.refused for reply in replies if reply.refused is not None), None)
        if refused is not None:
            return Judgement(0.0, f"the judge cannot be asked: {refused}")
        shares = [_share(reply.logprobs, self.worth) for reply in replies]
        valid = [share for share in shares if share is not None]
        if len(valid) < len(shares) or not valid:
            return Judgement(0.0, "the judge says none of its verdicts")
        if self.mode == "rubric":
            return Judgement(valid[0])
        first, second = valid  # of the second question the answer stands in the second place
        return Judgement((first + 1 - second) / 2, agrees=(first > 0.5) == (1 - second > 0.5))


class JudgeScorer:
    """See JudgeSpec."""

    def __init__(self, spec: JudgeSpec, ask: AskJudge) -> None:
        self._spec = spec
        self._ask = ask

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        """See Scorer.score. An answer that the judge says nothing about scores 0."""
        return [one.score for one in self.judgements(samples, interrupt)]

    def judgements(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[Judgement]:
        """One judgement a sample. Raises Unavailable, ModelNotFound for a judge that is gone, and what ``interrupt``
        raises."""
        questions = [self._spec.questions(sample) for sample in samples]
        replies = iter(self._ask(self._spec.version, [one for several in questions for one in several], interrupt))
        return [self._spec.judgement([next(replies) for _ in several]) for several in questions]


def _share(logprobs: Mapping[str, float], worth: Mapping[str, float]) -> float | None:
    """Worth of the verdicts by their probabilities; None: the judge would rather say something else."""
    chances = {verdict: math.exp(logprobs.get(verdict, -math.inf)) for verdict in worth}
    mass = math.fsum(chances.values())
    if not mass >= LEAST_MASS:  # nor NaN
        return None
    return math.fsum(chance * worth[verdict] for verdict, chance in chances.items()) / mass


def _filled(prompt: str, values: Mapping[str, str]) -> str:
    # In one pass: a placeholder inside of an answer stays what it is.
    return _PLACEHOLDER.sub(lambda match: values.get(match.group(1), match.group()), prompt)
