"""Bootstrap of a weighted mean: whole groups of items are drawn with replacement."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal, TypeAlias

from services.common.evaluation.statistics.quantiles import NORMAL, student_t
from services.common.evaluation.statistics.scores import Cluster, Scores

Kind: TypeAlias = Literal["percentile", "bca"]


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Number of draws, and the seed that makes an interval the same each time."""

    draws: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draws < 100:
            raise ValueError(f"a bootstrap needs 100 draws or more, got {self.draws}")


def bootstrap_ends(scores: Scores, level: float, kind: Kind, bootstrap: Bootstrap) -> tuple[float, float]:
    """Ends of the bootstrap's interval of the mean.

    "percentile" takes the quantiles of the means drawn; "bca" corrects their levels for bias and skew (Efron, JASA 82,
    1987). Both reach further for few groups: the plain quantiles are too narrow by the factor sqrt((n - 1) / n) and by
    the normal quantile in place of Student's (Hesterberg, The American Statistician 69, 2015, "expanded percentile").

    Raises:
        ValueError: there is one group only.
    """
    count = len(scores.clusters)
    if count < 2:
        raise ValueError("the spread of one group is unknown: a suite needs two groups or more")
    means = replicates(scores.clusters, bootstrap)
    reach = math.sqrt(count / (count - 1)) * student_t((1 + level) / 2, count - 1)
    levels = (NORMAL.cdf(-reach), NORMAL.cdf(reach)) if kind == "percentile" else _bca_levels(scores, means, reach)
    return quantile(means, levels[0]), quantile(means, levels[1])


def replicates(clusters: tuple[Cluster, ...], bootstrap: Bootstrap) -> list[float]:
    """Means of as many clusters, drawn with replacement; sorted."""
    draw = random.Random(bootstrap.seed).choices
    count = len(clusters)
    if len({cluster.weight for cluster in clusters}) == 1:
        means = [cluster.total / cluster.weight for cluster in clusters]
        return sorted(sum(draw(means, k=count)) / count for _ in range(bootstrap.draws))
    found = []
    for _ in range(bootstrap.draws):
        drawn = draw(clusters, k=count)
        found.append(sum(cluster.total for cluster in drawn) / sum(cluster.weight for cluster in drawn))
    return sorted(found)


def quantile(ordered: list[float], probability: float) -> float:
    """Quantile of a sorted sample, with linear interpolation (type 7 of Hyndman & Fan, 1996)."""
    place = min(max(probability, 0.0), 1.0) * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _bca_levels(scores: Scores, means: list[float], reach: float) -> tuple[float, float]:
    mean = scores.mean
    below = sum(value < mean for value in means) + sum(value == mean for value in means) / 2
    # A share of 0 or 1 has no quantile; half a draw is as far as the draws can tell.
    bias = NORMAL.inv_cdf(min(max(below, 0.5), len(means) - 0.5) / len(means))
    acceleration = _acceleration(scores.clusters)

    def corrected(z: float) -> float:
        return NORMAL.cdf(bias + (bias + z) / (1 - acceleration * (bias + z)))

    return corrected(-reach), corrected(reach)


def _acceleration(clusters: tuple[Cluster, ...]) -> float:
    """Skew of the mean, from its values with one cluster left out each."""
    total = math.fsum(cluster.total for cluster in clusters)
    weight = math.fsum(cluster.weight for cluster in clusters)
    without = [(total - cluster.total) / (weight - cluster.weight) for cluster in clusters]
    middle = math.fsum(without) / len(without)
    squares = math.fsum((middle - value) ** 2 for value in without)
    return 0.0 if squares == 0 else math.fsum((middle - value) ** 3 for value in without) / (6 * squares**1.5)
