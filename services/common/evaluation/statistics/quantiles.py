"""Quantiles of the normal distribution and of Student's t, and tails of the binomial."""

from __future__ import annotations

import math
from statistics import NormalDist

NORMAL = NormalDist()
"""The standard normal distribution."""


def student_t(probability: float, degrees: int) -> float:
    """Quantile of Student's t.

    Exact for 1 and 2 degrees of freedom; above, the expansion of Abramowitz & Stegun 26.7.5, whose error is below
    0.2 % at the levels of intervals.

    Args:
        probability: between 0 and 1, both excluded.
        degrees: at least 1.
    """
    if degrees < 1:
        raise ValueError(f"Student's t needs 1 degree of freedom or more, got {degrees}")
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NORMAL.inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(degrees) ** power for power, term in enumerate(terms, 1))


def fair_tail(successes: int, count: int) -> float:
    """Probability of at least so many heads of ``count`` fair coins, computed in whole numbers."""
    if successes <= 0:
        return 1.0
    term = total = math.comb(count, successes) if successes <= count else 0
    for heads in range(successes, count):
        term = term * (count - heads) // (heads + 1)
        total += term
    return total / (1 << count)
