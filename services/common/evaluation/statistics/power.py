"""Power of a suite: the smallest difference between two targets that so many items show."""

from __future__ import annotations

import math

from services.common.evaluation.statistics.quantiles import NORMAL

ALPHA = 0.05
POWER = 0.8


def smallest_difference(standard_error: float, *, alpha: float = ALPHA, power: float = POWER) -> float:
    """Smallest true mean difference that a two-sided test at ``alpha`` finds with probability ``power``.

    Args:
        standard_error: of the mean difference.
    """
    _check(alpha, power)
    return (NORMAL.inv_cdf(1 - alpha / 2) + NORMAL.inv_cdf(power)) * standard_error


def smallest_gain(items: float, discordant: float, *, alpha: float = ALPHA, power: float = POWER) -> float | None:
    """Smallest gain in accuracy that McNemar's test finds with probability ``power``, by the sample size of Connor
    (Biometrics 43, 1987). For scores of 0 and 1, before anything was run.

    Args:
        items: independent items of equal weight; those of a suite with weights or groups are fewer
            (`Scores.effective_clusters`).
        discordant: share of the items that one of the targets has right and the other wrong, above 0 and at most 1.

    Returns:
        The gain as a share of the items; None: even if every such item favours one target, the suite is too small.
    """
    _check(alpha, power)
    if items <= 0 or not 0 < discordant <= 1:
        raise ValueError(f"{items} items of which a share of {discordant} differs")
    found, wanted = NORMAL.inv_cdf(1 - alpha / 2), NORMAL.inv_cdf(power)

    def needed(gain: float) -> float:
        return ((found * math.sqrt(discordant) + wanted * math.sqrt(discordant - gain * gain)) / gain) ** 2

    low, high = 0.0, discordant
    if needed(high) > items:
        return None
    for _ in range(60):  # halves the interval below a float's precision
        middle = (low + high) / 2
        low, high = (low, middle) if needed(middle) <= items else (middle, high)
    return high


def _check(alpha: float, power: float) -> None:
    if not 0 < alpha < 1 or not 0.5 <= power < 1:
        raise ValueError(f"alpha {alpha} and power {power}: alpha lies between 0 and 1, power between 0.5 and 1")
