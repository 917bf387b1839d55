"""Scorer that compares the whole completion with the prompt's answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.common.jobs.scorers.base import ScorerSpec
from services.common.jobs.scorers.sample import Sample


class ExactReward(ScorerSpec):
    """1 if the completion is the prompt's answer, else 0."""

    type: Literal["exact"] = "exact"
    strip: bool = True
    """Whether white space at both ends is ignored, of both texts."""
    ignore_case: bool = False

    always_compares: ClassVar[bool] = True

    def scorer(self, where: str, webhooks: Webhooks) -> ExactScorer:
        """See ScorerSpec."""
        del where, webhooks
        return ExactScorer(self)


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
