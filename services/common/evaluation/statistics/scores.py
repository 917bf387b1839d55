"""Scores of a suite's items, with the weights of the items and the groups that belong together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Cluster:
    """Sums over the items of one group, which are drawn together; an item without a group is one by itself."""

    total: float
    """Sum of weight times score."""
    weight: float


@dataclass(frozen=True)
class Scores:
    """One score an item, in the order of the suite's items.

    Args:
        values: the score of each item; where an item has several samples, their mean. An answer that could not be read
            is a score, too: nothing is left out.
        weights: weight of each item, above 0; None: 1 each.
        groups: name of each item's group, or None; items of one group say much the same (questions on one text,
            variants of one problem).

    Raises:
        ValueError: there are no items, a number is not finite or a weight not above 0, or the lengths differ.
    """

    values: Sequence[float]
    weights: Sequence[float] | None = None
    groups: Sequence[str | None] | None = None

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("there are no scores")
        for name, given in (("weights", self.weights), ("groups", self.groups)):
            if given is not None and len(given) != len(self.values):
                raise ValueError(f"there are {len(self.values)} scores and {len(given)} {name}")
        if not all(map(math.isfinite, self.values)):
            raise ValueError("scores must be finite numbers")
        if not all(math.isfinite(weight) and weight > 0 for weight in self.weights or ()):
            raise ValueError("weights must be finite numbers above 0")

    @cached_property
    def clusters(self) -> tuple[Cluster, ...]:
        """The groups, and each item without a group, in order of appearance."""
        sums: dict[tuple[int, str], tuple[float, float]] = {}
        for index, value in enumerate(self.values):
            group = None if self.groups is None else self.groups[index]
            key = (index, "") if group is None else (-1, group)
            weight = 1.0 if self.weights is None else self.weights[index]
            total, mass = sums.get(key, (0.0, 0.0))
            sums[key] = (total + weight * value, mass + weight)
        return tuple(Cluster(total, mass) for total, mass in sums.values())

    @property
    def mean(self) -> float:
        """Mean by weight."""
        return self._total / self._mass

    @property
    def binary(self) -> bool:
        """Whether every score is 0 or 1."""
        return all(value in (0.0, 1.0) for value in self.values)

    @property
    def simple(self) -> bool:
        """Whether all items count alike and are independent: equal weights, and no two of one group."""
        return len(self.clusters) == len(self.values) and len({cluster.weight for cluster in self.clusters}) == 1

    @property
    def standard_error(self) -> float:
        """Standard error of the mean over clusters, by linearisation of the ratio (Cochran, Sampling Techniques, 6.11).

        Raises:
            ValueError: there is one cluster only.
        """
        count, mean = len(self.clusters), self.mean
        if count < 2:
            raise ValueError("the spread of one group is unknown: a suite needs two groups or more")
        squares = math.fsum((cluster.total - mean * cluster.weight) ** 2 for cluster in self.clusters)
        return math.sqrt(squares * count / (count - 1)) / self._mass

    @property
    def effective_clusters(self) -> float:
        """Number of clusters of equal weight that say as much (Kish, Survey Sampling, 1965)."""
        return self._mass**2 / math.fsum(cluster.weight**2 for cluster in self.clusters)

    @property
    def effective_items(self) -> float:
        """Number of independent items of equal weight that say as much, were there no groups (Kish)."""
        weights = self.weights
        return float(len(self.values)) if weights is None else sum(weights) ** 2 / math.fsum(w * w for w in weights)

    def minus(self, other: Scores) -> Scores:
        """Differences from the scores of another target on the same items.

        Raises:
            ValueError: weights, groups or the number of items differ.
        """
        if len(self.values) != len(other.values):
            raise ValueError(f"targets with {len(self.values)} and {len(other.values)} scores cannot be paired")
        if (self.weights, self.groups) != (other.weights, other.groups):
            raise ValueError("targets whose items differ in weights or groups cannot be paired")
        differences = [mine - theirs for mine, theirs in zip(self.values, other.values, strict=True)]
        return Scores(differences, self.weights, self.groups)

    @cached_property
    def _total(self) -> float:
        return math.fsum(cluster.total for cluster in self.clusters)

    @cached_property
    def _mass(self) -> float:
        return math.fsum(cluster.weight for cluster in self.clusters)
