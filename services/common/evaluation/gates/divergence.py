"""Bound of a gate on how far a result may be from what it is to replace."""

from __future__ import annotations

from services.common.adapters.evidence import DivergenceEvidence
from services.common.evaluation.statistics.intervals import estimate
from services.common.evaluation.statistics.scores import Scores


def bounded(values: Scores, *, tokens: int, max_kl: float) -> DivergenceEvidence:
    """Decides whether a divergence is within a bound: the upper end of its interval has to be.

    Args:
        values: mean of log p_before - log p_after over the tokens of each answer, with their number as its weight.
        tokens: number of all.
    """
    found = estimate(values)
    low, high = found.interval.low, found.interval.high
    return DivergenceEvidence(
        kl=found.mean,
        interval=(low, high),
        max_kl=max_kl,
        prompts=len(values.values),
        tokens=tokens,
        passed=high <= max_kl,
    )
