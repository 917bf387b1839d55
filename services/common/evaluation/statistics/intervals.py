"""Intervals of a mean: Wilson's for scores of 0 and 1, the bootstrap's for all others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from services.common.evaluation.statistics.bootstrap import Bootstrap, Kind, bootstrap_ends
from services.common.evaluation.statistics.quantiles import NORMAL, student_t
from services.common.evaluation.statistics.scores import Scores

Method: TypeAlias = Literal["wilson", "percentile", "bca", "tango"]
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """Interval that covers the true value with the probability ``level``, over repeated draws of the items."""

    low: float
    high: float
    level: float
    method: Method

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"an interval from {self.low} to {self.high}")
        check_level(self.level)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean of a suite's scores with its interval."""

    mean: float
    interval: Interval
    items: int
    clusters: int
    """Groups, and items without a group."""


def check_level(level: float) -> None:
    """Raises ValueError unless it is a probability that an interval can have."""
    if not 0 < level < 1:
        raise ValueError(f"a level lies between 0 and 1, got {level}")


def estimate(
    scores: Scores, level: float = LEVEL, kind: Kind = "percentile", bootstrap: Bootstrap | None = None
) -> Estimate:
    """The mean of scores: with Wilson's interval if all are 0 or 1, else with the bootstrap's.

    Args:
        kind: of the bootstrap's interval.
        bootstrap: draws and seed; None: the defaults.

    Raises:
        ValueError: real-valued scores of a single group, whose spread nobody knows.
    """
    check_level(level)
    if scores.binary:
        interval = wilson_of(scores, level)
    else:
        low, high = bootstrap_ends(scores, level, kind, bootstrap or Bootstrap())
        interval = Interval(low, high, level, kind)
    return Estimate(scores.mean, interval, len(scores.values), len(scores.clusters))


def wilson(share: float, count: float, level: float = LEVEL) -> Interval:
    """Wilson's score interval (JASA 22, 1927).

    Args:
        share: of successes.
        count: independent items, above 0; need not be whole.
    """
    if not 0 <= share <= 1 or count <= 0:
        raise ValueError(f"a share of {share} among {count} items")
    z = NORMAL.inv_cdf((1 + level) / 2)
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2) / (1 + z * z / count)
    # At 0 and 1 one end is exactly there; rounding may not push it past the share.
    return Interval(max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share)), level, "wilson")


def wilson_of(scores: Scores, level: float = LEVEL) -> Interval:
    """Wilson's interval of scores of 0 and 1.

    With weights or groups the number of items is the effective one: that at which independent items would have the
    observed standard error, corrected by Student's t for few groups (Korn & Graubard, Survey Methodology 24, 1998), and
    at most what the weights leave. Where all scores are equal, nobody knows how alike the items of a group are, and the
    groups are counted instead.
    """
    share = scores.mean
    if scores.simple:
        return wilson(share, len(scores.values), level)
    count = scores.effective_clusters
    if 0 < share < 1 and len(scores.clusters) > 1 and (error := scores.standard_error) > 0:
        upper = (1 + level) / 2
        few = NORMAL.inv_cdf(upper) / student_t(upper, len(scores.clusters) - 1)
        count = min(scores.effective_items, share * (1 - share) / error**2 * few**2)
    return wilson(share, count, level)
