"""Rewards that look at the text itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import re2

from services.common.scorers.base import ExactReward, NumericReward, RegexReward, answer_number
from services.common.scorers.json_schema import Matcher, matcher
from services.common.scorers.sample import Sample

_NUMBER = re2.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?|[-+]?\.\d+(?:[eE][-+]?\d{1,3})?")
"""Linear in the text, whatever it is."""


class RegexScorer:
    """See RegexReward. Raises InvalidRequest if the pattern cannot be used."""

    def __init__(self, spec: RegexReward, where: str) -> None:
        self._spec = spec
        self._where = where
        self._known: dict[str | None, Matcher] = {}
        self._matcher("")

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        """See Scorer.score."""
        self._known.clear()  # one round's answers
        interrupt()
        return [float(self._matcher(sample.answer)(_utf8(sample.text))) for sample in samples]

    def _matcher(self, answer: str | None) -> Matcher:
        key = answer if self._spec.needs_answer else None
        if key not in self._known:
            self._known[key] = matcher(self._spec, key, self._where)
        return self._known[key]


class ExactScorer:
    """See ExactReward."""

    def __init__(self, spec: ExactReward) -> None:
        self._spec = spec

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        """See Scorer.score."""
        interrupt()
        return [float(self._normal(sample.text) == self._normal(sample.answer or "")) for sample in samples]

    def _normal(self, text: str) -> str:
        text = text.strip() if self._spec.strip else text
        return text.casefold() if self._spec.ignore_case else text


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


def last_number(text: str) -> float | None:
    """The last number of a text, None if there is none that a float holds: "about 1,234.5 km" is 1234.5."""
    found = None
    for match in _NUMBER.finditer(_utf8(text)):
        found = match.group()
    return None if found is None else answer_number(found)


def _utf8(text: str) -> str:
    """RE2 works on UTF-8, which has no lone surrogates."""
    return text.encode("utf-8", "replace").decode("utf-8")
