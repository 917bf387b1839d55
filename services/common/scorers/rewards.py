"""Scores for what a job sampled: one module a family of rewards; `Rewards` adds them up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from services.common.errors import InvalidRequest
from services.common.scorers.base import (
    ExactReward,
    JsonSchemaReward,
    NumericReward,
    RegexReward,
    RewardSpec,
    WebhookReward,
)
from services.common.scorers.json_text import JsonSchemaScorer
from services.common.scorers.sample import Sample, Scorer
from services.common.scorers.text import ExactScorer, NumericScorer, RegexScorer
from services.common.scorers.webhook_client import Webhooks, WebhookScorer

_LARGEST = 1e9
"""As of a reward that comes with a rollout (services/common/jobs/kinds/grpo.py)."""

__all__ = ["Rewards", "Sample", "Webhooks"]


class Rewards:
    """The weighted sum of a job's rewards.

    Raises:
        InvalidRequest: a pattern, schema or URL cannot be used; names it.
    """

    def __init__(self, specs: Sequence[RewardSpec], webhooks: Webhooks) -> None:
        self._weights = [spec.weight for spec in specs]
        self._scorers = [_scorer(spec, webhooks, f"generate.reward[{index}]") for index, spec in enumerate(specs)]

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None] = lambda: None) -> list[float]:
        """One reward a sample.

        Args:
            interrupt: called now and then; may raise.

        Raises:
            Unavailable: a webhook failed, also when asked again.
        """
        totals = [0.0] * len(samples)
        for weight, scorer in zip(self._weights, self._scorers, strict=True):
            scores = scorer.score(samples, interrupt)
            totals = [total + weight * score for total, score in zip(totals, scores, strict=True)]
        worst = max(map(abs, totals), default=0.0)
        if not math.isfinite(worst) or worst > _LARGEST:
            raise InvalidRequest(
                f"a reward of {worst:g} is over {_LARGEST:g}: lower the weights", param="generate.reward"
            )
        return totals


def _scorer(spec: RewardSpec, webhooks: Webhooks, where: str) -> Scorer:
    match spec:
        case RegexReward():
            return RegexScorer(spec, where)
        case ExactReward():
            return ExactScorer(spec)
        case NumericReward():
            return NumericScorer(spec)
        case JsonSchemaReward():
            return JsonSchemaScorer(spec, where)
        case WebhookReward():
            return WebhookScorer(webhooks, spec.url, where)
