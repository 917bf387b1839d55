"""Flatness of a series: a robust slope behind the warm-up, against a stated bound."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

_MOST = 300
"""Samples that a slope is made of; longer series are thinned."""
Point = tuple[float, float]
"""Seconds, value."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Growth over the time behind the warm-up that still counts as flat: a share of the median, and so much more."""

    share: float
    more: float

    def limit(self, middle: float) -> float:
        return self.share * middle + self.more


@dataclass(frozen=True, slots=True)
class Verdict:
    """A series, and whether it is flat."""

    name: str
    first: float
    last: float
    peak: float
    growth: float
    """Slope times the seconds behind the warm-up."""
    limit: float

    @property
    def flat(self) -> bool:
        return self.growth <= self.limit


def slope(points: Sequence[Point]) -> float:
    """Median of the slopes between any two points (Theil 1950, Sen 1968): a tenth of outliers changes little."""
    thinned = points[:: max(1, len(points) // _MOST)]
    found = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(thinned, 2) if b[0] > a[0]]
    return median(found) if found else 0.0


def of_even_traffic(points: Sequence[Point], done: Sequence[Point], window: float) -> list[Point]:
    """A series of what stays for so many seconds, as it would be had the traffic of each such time been that of the
    median: a machine that does other things, too, has less of it, and so less that stays.

    Args:
        done: all that had been done so far, at times that begin no later than the points'.
        window: seconds for which it stays; points before it are left as they are.
    """
    times = [at for at, _ in done]

    def until(at: float) -> float:
        return done[max(0, bisect.bisect_right(times, at) - 1)][1]

    begin = points[0][0] + window
    within = {at: max(1.0, until(at) - until(at - window)) for at, _ in points if at >= begin}
    middle = median(within.values()) if within else 1.0
    return [(at, value * middle / within.get(at, middle)) for at, value in points]


def judge(name: str, points: Sequence[Point], bound: Bound, *, warm_up: float) -> Verdict:
    """Judges a series.

    Args:
        points: in the order of time.
        warm_up: share of the time that does not count.
    """
    begin = points[0][0] + warm_up * (points[-1][0] - points[0][0])
    counted = [point for point in points if point[0] >= begin]
    values = [value for _, value in counted]
    growth = slope(counted) * (counted[-1][0] - counted[0][0])
    return Verdict(
        name, round(values[0], 1), round(values[-1], 1), round(max(values), 1), growth, bound.limit(median(values))
    )


def spark(values: Sequence[float], width: int = 40) -> str:
    """The course of a series as bars, from 0 to its peak."""
    size = max(1, len(values) // width)
    means = [
        sum(values[start : start + size]) / len(values[start : start + size]) for start in range(0, len(values), size)
    ]
    peak = max(means) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * mean / peak))] for mean in means[:width])
