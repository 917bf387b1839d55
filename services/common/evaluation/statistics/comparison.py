"""Paired comparison of two targets on the same items: effect, interval, p-value, and what the suite could have seen."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

from services.common.evaluation.statistics.bootstrap import Bootstrap, Kind, bootstrap_ends
from services.common.evaluation.statistics.intervals import LEVEL, Interval, check_level
from services.common.evaluation.statistics.power import POWER, smallest_difference
from services.common.evaluation.statistics.quantiles import NORMAL, fair_tail
from services.common.evaluation.statistics.scores import Scores

Alternative: TypeAlias = Literal["two-sided", "better", "worse"]
"""Hypothesis besides "no difference": the second target differs, is better, is worse."""
Test: TypeAlias = Literal["mcnemar", "sign-flip"]

_DIGITS = 12
"""Differences, as parts of the largest one, that agree to so many digits are the same."""
_ROUNDING = 1e-11
"""Error of each difference in a sum: the same sum in another order is no other."""
_EXACT = 5_000
"""Most different sums of signs that are counted out instead of drawn."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a paired comparison: the second target minus the first."""

    effect: float
    """Mean difference by weight; above 0: the second target is better."""
    interval: Interval
    p: float
    """Probability of a difference at least as large, were there none."""
    test: Test
    alternative: Alternative
    items: int
    clusters: int
    better: int
    """Items on which the second target scores higher."""
    worse: int
    sees: float | None
    """Smallest true difference that this comparison finds with a power of 0.8, two-sided, at 1 - level; None: no two
    scores differ, so that nobody knows."""


def compare(
    first: Scores,
    second: Scores,
    *,
    alternative: Alternative = "two-sided",
    level: float = LEVEL,
    kind: Kind = "percentile",
    bootstrap: Bootstrap | None = None,
) -> Comparison:
    """Compares two targets by the differences of their scores on each item.

    Scores of 0 and 1 on independent items of equal weight are compared by McNemar's exact test, with Tango's interval,
    which is sound where few or no items differ. All others are compared by flipping the signs of the
    groups' differences, with the paired bootstrap's interval.

    Args:
        kind: of the bootstrap's interval.
        bootstrap: draws and seed, of the flips as well; None: the defaults.

    Raises:
        ValueError: the targets were not scored on the same items, or all items are of one group.
    """
    check_level(level)
    bootstrap = bootstrap or Bootstrap()
    differences = second.minus(first)
    better = sum(value > 0 for value in differences.values)
    worse = sum(value < 0 for value in differences.values)
    test: Test
    if first.binary and second.binary and differences.simple:
        test, p = "mcnemar", mcnemar(better, worse, alternative)
        interval = tango(better, worse, len(differences.values), level)
        error = (interval.high - interval.low) / (2 * NORMAL.inv_cdf((1 + level) / 2))
    else:
        test, p = "sign-flip", sign_flip(differences, alternative, bootstrap)
        low, high = bootstrap_ends(differences, level, kind, bootstrap)
        interval = Interval(low, high, level, kind)
        error = differences.standard_error
    return Comparison(
        effect=differences.mean,
        interval=interval,
        p=p,
        test=test,
        alternative=alternative,
        items=len(differences.values),
        clusters=len(differences.clusters),
        better=better,
        worse=worse,
        sees=smallest_difference(error, alpha=1 - level, power=POWER) if error > 0 else None,
    )


def mcnemar(better: int, worse: int, alternative: Alternative = "two-sided") -> float:
    """p-value of McNemar's exact test (Psychometrika 12, 1947): of the items on which the targets differ, each favours
    either with probability ½.

    Args:
        better: items that the second target alone has right.
        worse: items that the first target alone has right.
    """
    count = better + worse
    if alternative == "two-sided":
        return min(1.0, 2 * fair_tail(max(better, worse), count))
    return fair_tail(better if alternative == "better" else worse, count)


def tango(better: int, worse: int, count: int, level: float = LEVEL) -> Interval:
    """Score interval of the difference of two paired proportions (Tango, Statistics in Medicine 17, 1998): the
    differences that the data do not contradict.

    Args:
        count: all items.
    """
    reach = NORMAL.inv_cdf((1 + level) / 2)

    def edge(bound: float) -> float:
        """Difference at which the score is ``bound``; it falls as the difference grows."""
        low, high = -1.0, 1.0
        for _ in range(60):  # halves the interval below a float's precision
            middle = (low + high) / 2
            low, high = (middle, high) if _score(better, worse, count, middle) > bound else (low, middle)
        return (low + high) / 2

    return Interval(edge(reach), edge(-reach), level, "tango")


def _score(better: int, worse: int, count: int, difference: float) -> float:
    """Score statistic of a difference of paired proportions, with the most likely share of worse items beside it."""
    linear = (2 * count - better + worse) * difference - better - worse
    constant = -worse * difference * (1 - difference)
    root = math.sqrt(max(0.0, linear * linear - 8 * count * constant))  # rounding may fall below
    share = (root - linear) / (4 * count)
    variance = count * (2 * share + difference * (1 - difference))
    distance = better - worse - count * difference
    if variance <= 0:
        return 0.0 if distance == 0 else math.copysign(math.inf, distance)
    return distance / math.sqrt(variance)


def sign_flip(differences: Scores, alternative: Alternative = "two-sided", bootstrap: Bootstrap | None = None) -> float:
    """p-value of the sign-flip permutation test: were the targets alike, each group's difference could as well have the
    other sign.

    It is counted out exactly where the groups' differences have few different sums, and drawn otherwise; drawn p-values
    count what was seen as a draw, so that they are valid as well (Phipson & Smyth, 2010).
    """
    totals = [cluster.total for cluster in differences.clusters if cluster.total]
    if not totals:
        return 1.0
    largest = max(map(abs, totals))
    # Groups of equal |difference| are as many fair coins.
    coins = Counter(round(abs(total) / largest, _DIGITS) for total in totals)
    seen = math.fsum(totals) / largest
    slack = _ROUNDING * len(totals)
    if math.prod(count + 1 for count in coins.values()) <= _EXACT:
        chances = _counted(coins).items()
        return min(1.0, math.fsum(chance for value, chance in chances if _extreme(value, seen, slack, alternative)))
    drawn = bootstrap or Bootstrap()
    bits = random.Random(drawn.seed).getrandbits
    sizes = list(coins.items())
    hits = 0
    for _ in range(drawn.draws):
        value = sum(size * (2 * bits(count).bit_count() - count) for size, count in sizes)
        hits += _extreme(value, seen, slack, alternative)
    return (hits + 1) / (drawn.draws + 1)


def _counted(coins: Counter[float]) -> dict[float, float]:
    """Probability of each sum of signed differences."""
    sums = {0.0: 1.0}
    for size, count in coins.items():
        chances = [math.comb(count, heads) / (1 << count) for heads in range(count + 1)]
        wider: dict[float, float] = {}
        for value, chance in sums.items():
            for heads, share in enumerate(chances):
                total = round(value + size * (2 * heads - count), _DIGITS)
                wider[total] = wider.get(total, 0.0) + chance * share
        sums = wider
    return sums


def _extreme(value: float, seen: float, slack: float, alternative: Alternative) -> bool:
    """Whether a sum of signed differences is at least as far out as the one seen."""
    if alternative == "better":
        return value >= seen - slack
    if alternative == "worse":
        return value <= seen + slack
    return abs(value) >= abs(seen) - slack
