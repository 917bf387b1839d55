"""Scorer by a judge: a version of an adapter, or the base, reads the answer and says a verdict.

A runner asks the judge's engine the `questions` and gives back, of each, the log-probabilities of its verdicts; the
score is what the verdicts are worth, by the probability that the judge gives each. A judge of which only text is known
says one verdict (`parse_verdict`). Pairs are asked in both orders, because judges favour a position (Zheng et al.,
arXiv 2306.05685).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from services.common.adapters.names import BASE, SAMPLER_SCHEMA, parse_adapter_version
from services.common.jobs.scorers.base import ScorerSettings
from services.common.jobs.scorers.sample import Reference
from services.common.storage.names import field_check
from services.common.validation.json_rules import Rules, has, only_with

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


def _judge(name: str) -> None:
    if name != BASE:
        parse_adapter_version(name)


@dataclass(frozen=True, slots=True)
class JudgeQuestion:
    """One question to the judge, and the verdicts that answer it."""

    prompt: str
    verdicts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Score of an answer by a judge."""

    score: float
    """0 where the judge answered something else: an answer that nobody judged is not left out."""
    valid: bool
    """Whether every question was answered with a verdict."""
    agrees: bool = True
    """Whether both orders of a pair favour the same answer."""


class JudgeSpec(ScorerSettings):
    """Score of an answer by a judge, from 0 to 1. Of suites only.

    rubric: the judge rates each answer. pairwise: it says which of two answers is better, the answer or the item's
    first expected one, in both orders; the score is the probability that it favours the answer.
    """

    type: Literal["judge"] = "judge"
    judge: Annotated[str, field_check(_judge), Field(json_schema_extra=dict(SAMPLER_SCHEMA))] = BASE
    """"base", or a version of an adapter, "name@n"."""
    mode: Literal["rubric", "pairwise"] = "rubric"
    prompt: str | None = Field(None, min_length=1, max_length=20_000)
    """Question to the judge. rubric: with {question}, {answer} and, if wanted, {expected}; pairwise: with {question},
    {first} and {second}. None: one of ours."""
    verdicts: dict[str, Annotated[float, Field(ge=0, le=1)]] | None = Field(None, min_length=2, max_length=100)
    """rubric: what the judge may say, with what each is worth. None: 1 to 5, worth 0 to 1."""

    json_rules: ClassVar[Rules] = (only_with("verdicts", has(mode="rubric")),)

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

    def questions(self, question: str, answer: str, reference: Reference) -> list[JudgeQuestion]:
        """Questions about one answer: one, or two for a pair, in both orders."""
        expected = reference.expected[0] if reference.expected else ""
        verdicts = tuple(self.worth)
        if self.mode == "rubric":
            values = {"question": question, "answer": answer, "expected": expected}
            return [JudgeQuestion(_filled(self.prompt or _RUBRIC, values), verdicts)]
        return [
            JudgeQuestion(
                _filled(self.prompt or _PAIR, {"question": question, "first": one, "second": other}), verdicts
            )
            for one, other in ((answer, expected), (expected, answer))
        ]

    def judgement(self, found: Sequence[Mapping[str, float]]) -> Judgement:
        """Judgement by the log-probabilities of the verdicts, a mapping a question in the order of ``questions``."""
        shares = [_share(logprobs, self.worth) for logprobs in found]
        valid = [share for share in shares if share is not None]
        if len(valid) < len(shares) or not valid:
            return Judgement(0.0, valid=False)
        if self.mode == "rubric":
            return Judgement(valid[0], valid=True)
        first, second = valid  # of the second question the answer stands in the second place
        return Judgement((first + 1 - second) / 2, valid=True, agrees=(first > 0.5) == (1 - second > 0.5))


def parse_verdict(text: str, verdicts: Sequence[str]) -> str | None:
    """Verdict in a judge's text: what stands in [[ ]], else the only one in its last line that has words; None: there
    is none, or several that contradict each other. Case does not count."""
    marked = re.findall(r"\[\[(.+?)\]\]", text)
    lines = [line for line in text.splitlines() if line.strip()]
    place = marked[-1] if marked else lines[-1] if lines else ""
    found = {
        verdict
        for verdict in verdicts
        if re.search(rf"(?<![\w.]){re.escape(verdict)}(?![\w]|\.\w)", place, re.IGNORECASE) is not None
    }
    return found.pop() if len(found) == 1 else None


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
