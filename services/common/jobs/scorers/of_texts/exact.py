"""Scorers that compare texts: the whole completion with the prompt's answer, or a part of it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field

from services.common.jobs.scorers.base import ScorerSpec
from services.common.jobs.scorers.grants import Grants
from services.common.jobs.scorers.sample import Sample
from services.common.validation.strict_models import absent

Normalization: TypeAlias = Literal["squad"]
_ARTICLES = ("a", "an", "the")


class ExactReward(ScorerSpec):
    """1 if the completion is the prompt's answer, else 0."""

    type: Literal["exact"] = "exact"
    strip: bool = True
    """Whether white space at both ends is ignored, of both texts."""
    ignore_case: bool = False
    normalize: Normalization | None = Field(None, exclude_if=absent)
    """"squad": case, punctuation, the articles a, an and the, and runs of white space do not count, of both texts."""

    always_compares: ClassVar[bool] = True

    def vote(self, text: str) -> str | None:
        """See SampleScorerSpec: the text in the form in which it is compared."""
        return self._normal(text) or None

    def scorer(self, where: str, grants: Grants) -> TextScorer:
        """See ScorerSpec."""
        del where, grants
        return TextScorer(self._normal, str.__eq__)

    def _normal(self, text: str) -> str:
        if self.normalize is not None:
            return squad(text)
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


class ContainsReward(ScorerSpec):
    """1 if the prompt's answer is a part of the completion, else 0."""

    type: Literal["contains"] = "contains"
    ignore_case: bool = False
    normalize: Normalization | None = None
    """As with exact; the answer is then found as whole words."""

    always_compares: ClassVar[bool] = True

    def wrong_answer(self, answer: str) -> str | None:
        """See ScorerSettings."""
        return None if self._normal(answer).strip() else "every completion contains it"

    def scorer(self, where: str, grants: Grants) -> TextScorer:
        """See ScorerSpec."""
        del where, grants
        return TextScorer(self._normal, str.__contains__)

    def _normal(self, text: str) -> str:
        if self.normalize is not None:
            return f" {squad(text)} "
        return text.casefold() if self.ignore_case else text


class TextScorer:
    """See ExactReward and ContainsReward.

    Args:
        normal: form of both texts in which they are compared.
        agrees: whether a completion, the first argument, agrees with an answer.
    """

    def __init__(self, normal: Callable[[str], str], agrees: Callable[[str, str], bool]) -> None:
        self._normal = normal
        self._agrees = agrees

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        """See Scorer.score."""
        interrupt()
        return [float(self._agrees(self._normal(sample.text), self._normal(sample.answer or ""))) for sample in samples]


def squad(text: str) -> str:
    """Normal form of an answer as SQuAD's evaluation has it (Rajpurkar et al., EMNLP 2016): without case, punctuation
    (Unicode's), articles and runs of white space."""
    kept = "".join(char for char in text.casefold() if unicodedata.category(char)[0] != "P")
    return " ".join(word for word in kept.split() if word not in _ARTICLES)
