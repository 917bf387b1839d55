"""Scorer that compares the last number of the completion with the prompt's answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import Field

from services.common.jobs.scorers.base import ScorerSpec
from services.common.jobs.scorers.grants import Grants
from services.common.jobs.scorers.sample import Sample, as_utf8

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?|[-+]?\.\d+(?:[eE][-+]?\d{1,3})?"
"""RE2 pattern of a number: it takes time linear in the text, whatever the text is."""


class NumericReward(ScorerSpec):
    """1 if the last number of the completion is the prompt's answer within the tolerance, else 0."""

    type: Literal["numeric"] = "numeric"
    tolerance: float = Field(1e-6, ge=0)
    """Largest absolute difference."""
    relative_tolerance: float = Field(0.0, ge=0, lt=1)
    """Largest difference as a share of the answer; the wider of the two holds."""

    always_compares: ClassVar[bool] = True

    def wrong_answer(self, answer: str) -> str | None:
        """See ScorerSpec."""
        return None if answer_number(answer) is not None else "the numeric reward needs a finite number"

    def vote(self, text: str) -> float | None:
        """See SampleScorerSpec: the last number."""
        return last_number(text)

    def scorer(self, where: str, grants: Grants) -> NumericScorer:
        """See ScorerSpec."""
        del where, grants
        return NumericScorer(self)


class NumericScorer:
    """See NumericReward."""

    def __init__(self, spec: NumericReward) -> None:
        self._spec = spec

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        """See Scorer.score."""
        interrupt()
        return [self._one(sample) for sample in samples]

    def _one(self, sample: Sample) -> float:
        wanted, said = answer_number(sample.answer or ""), last_number(sample.text)
        if wanted is None or said is None:
            return 0.0
        return float(
            math.isclose(
                said,
                wanted,
                rel_tol=0.0,
                abs_tol=max(self._spec.tolerance, self._spec.relative_tolerance * abs(wanted)),
            )
        )


def answer_number(answer: str) -> float | None:
    """The number that an answer is, None if it is none: "1,234.5", " 7 ", "-2e3"."""
    try:
        value = float(answer.strip().replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def last_number(text: str) -> float | None:
    """The last number of a text, None if there is none that a float holds: "about 1,234.5 km" is 1234.5."""
    found = None
    for match in _number().finditer(as_utf8(text)):
        found = match.group()
    return None if found is None else answer_number(found)


@cache
def _number() -> Any:
    """The compiled pattern of a number."""
    import re2

    return re2.compile(_NUMBER)
