"""Test of whether a mean difference exceeds a margin: a gain that must be exceeded, a loss that must be ruled out.

Signs cannot be flipped around a margin: a loss on one item of 60 is no mirror of nothing on the other 59. The mean of
bounded values is tested by Gaffke (2005; Learned-Miller and Thomas, arXiv 1905.06208) instead: the values and the worst
possible one, as one more, with weights drawn uniformly from the simplex. For right or wrong against a fixed mark this
is the exact binomial test (Clopper and Pearson).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from services.common.evaluation.statistics.quantiles import NORMAL
from services.common.evaluation.statistics.scores import Scores

_DIGITS = 12
_NEAR_MIDDLE = 1e-4
"""Distance from the middle, in standard deviations, within which the general formula loses its digits."""
_HALVINGS = 200


def exceeds(differences: Scores, margin: float, lowest: float) -> float:
    """p-value of the hypothesis that the mean difference is at most ``margin``; small: it is larger.

    Args:
        differences: the second target's scores minus the first's.
        lowest: the worst difference that an item can have, below ``margin``.

    Raises:
        ValueError: it is not below.
    """
    clusters = differences.clusters
    worst = (lowest - margin) * max(cluster.weight for cluster in clusters)
    if worst >= 0:
        raise ValueError(f"the lowest difference {lowest:g} is not below the margin {margin:g}")
    distances = [cluster.total - margin * cluster.weight for cluster in clusters]
    return weighted_sum_at_most_zero(Counter([*(round(value / -worst, _DIGITS) for value in distances), -1.0]))


def items_needed(loss: float, alpha: float) -> int:
    """Independent items on which a target that differs nowhere shows, at level ``alpha``, that it loses less than
    ``loss`` of scores between 0 and 1."""
    return math.ceil(math.log(alpha) / math.log1p(-loss)) if loss < 1 else 1


def weighted_sum_at_most_zero(values: Mapping[float, int]) -> float:
    """Probability that the sum of the values, each times an exponential variable of its own, is at most 0: that is the
    probability for uniform weights on the simplex. By the saddlepoint approximation of Lugannani and Rice (1980), which
    is off by less than a hundredth of the probability here.

    Args:
        values: how often each value occurs.
    """
    low, high = min(values), max(values)
    if high <= 0:
        return 1.0
    if low >= 0:
        return 0.0
    # The cumulant generating function -sum(n log(1 - t v)) exists between 1/low and 1/high; its derivative grows.
    left, right = 1 / low, 1 / high

    def slope(at: float) -> float:
        return math.fsum(count * value / (1 - at * value) for value, count in values.items())

    for _ in range(_HALVINGS):
        saddle = (left + right) / 2
        if saddle in (left, right):
            break
        left, right = (saddle, right) if slope(saddle) < 0 else (left, saddle)
    generating = -math.fsum(count * math.log1p(-saddle * value) for value, count in values.items())
    spread = math.sqrt(
        math.fsum(count * (value / (1 - saddle * value)) ** 2 for value, count in values.items())
    )  # the standard deviation of the tilted sum
    distance = math.copysign(math.sqrt(max(0.0, -2 * generating)), saddle)
    if abs(distance) < _NEAR_MIDDLE:
        third = 2 * math.fsum(count * value**3 for value, count in values.items())
        return 0.5 + third / (6 * math.sqrt(2 * math.pi) * spread**3)
    found = NORMAL.cdf(distance) + NORMAL.pdf(distance) * (1 / distance - 1 / (saddle * spread))
    return min(1.0, max(0.0, found))
