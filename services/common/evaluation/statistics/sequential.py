"""Sequential test: whether a candidate scores better, looked at as often as one likes, decided as early as can be.

Wald's test (Annals of Mathematical Statistics 16, 1945) of "no difference" against "better by ``gain``", over the
difference of two means. Its variance is the larger of two estimates: by both arms together, which a few lucky answers
of a candidate do not make small, and by each arm for itself, which a candidate needs that is liked now and hated then.
A look at any time costs nothing: the bounds hold for the whole course of the log-likelihood ratio. Beside it stands an
interval that is valid at every look at once, the normal mixture of Robbins (Annals of Mathematical Statistics 41,
1970), for plots and guardrails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from services.common.evaluation.statistics.power import ALPHA, POWER
from services.common.evaluation.statistics.quantiles import NORMAL

Verdict: TypeAlias = Literal["open", "better", "not better"]
LEAST = 30
"""Fewest observations of an arm before anything is decided: below, its variance is a guess."""
_MOST = 2.5
"""Multiple of a fixed test's information at which a test that still is open ends as not better."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Independent scores of one arm, as sums; those of parts add up."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 0 or self.squares < 0 or not math.isfinite(self.total + self.squares):
            raise ValueError(f"{self.count} scores with the sum {self.total} and squares {self.squares}")

    @classmethod
    def of(cls, scores: Iterable[float]) -> Observed:
        """The sums of scores."""
        kept = list(scores)
        return cls(len(kept), math.fsum(kept), math.fsum(score * score for score in kept))

    def __add__(self, other: Observed) -> Observed:
        return Observed(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        """Mean of the scores; 0 without any."""
        return self.total / self.count if self.count else 0.0

    @property
    def deviations(self) -> float:
        """Sum of squared deviations from the mean."""
        return max(self.squares - self.total * self.mean, 0.0)


@dataclass(frozen=True, slots=True)
class Look:
    """What is known after so many observations."""

    verdict: Verdict
    effect: float
    """Mean of the candidate minus that of the current one."""
    low: float
    """Lower end of the interval, which covers the true effect at all looks together with 1 - alpha, two-sided."""
    high: float
    evidence: float
    """Log-likelihood ratio of "better by the gain" to "no difference"."""
    progress: float
    """Way to the nearer decision, by evidence or by the end of the test: 0 to 1."""
    observed: tuple[int, int]
    """Observations of the current one and of the candidate."""


@dataclass(frozen=True, slots=True)
class SequentialTest:
    """Settings of a test, fixed before its first observation.

    ``gain``: smallest improvement of the mean worth a promotion. ``alpha``: probability that a candidate without an
    improvement is called better, at most. ``power``: probability that one which is better by the gain is called so.
    ``spread``: distance between the least and the greatest score.
    """

    gain: float
    alpha: float = ALPHA
    power: float = POWER
    spread: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 0.5 <= self.power < 1:
            raise ValueError(f"alpha {self.alpha} and power {self.power}: alpha < 0.5 <= power < 1")
        if not 0 < self.gain <= self.spread < math.inf:
            raise ValueError(f"a gain of {self.gain} where scores lie {self.spread} apart")

    @property
    def bounds(self) -> tuple[float, float]:
        """Evidence at which it ends: as not better, as better."""
        # Wald's bounds are for a known variance and no end; both ask for a little more than he does.
        missed, false = 0.85 * (1 - self.power), 0.9 * self.alpha
        return math.log(missed / (1 - false)), math.log((1 - missed) / false)

    @property
    def fixed_information(self) -> float:
        """Information (one over the variance of the effect) that a test of fixed size would need."""
        return ((NORMAL.inv_cdf(1 - self.alpha) + NORMAL.inv_cdf(self.power)) / self.gain) ** 2

    def look(self, current: Observed, candidate: Observed) -> Look:
        """Looks at what was observed so far."""
        counts = (current.count, candidate.count)
        effect = candidate.mean - current.mean
        if min(counts) < 1 or sum(counts) < 3:
            return Look("open", effect, -self.spread, self.spread, 0.0, 0.0, counts)
        error = max(self._pooled_error(current, candidate), own_error(current, candidate, self.spread))
        evidence = self.gain * (effect - self.gain / 2) / error
        lower, upper = self.bounds
        share = 1 / error / (_MOST * self.fixed_information)
        verdict: Verdict = "open"
        if min(counts) >= LEAST:
            if evidence >= upper:
                verdict = "better"
            elif evidence <= lower or share >= 1:
                verdict = "not better"
        half = half_width(error, self.gain, self.alpha)
        progress = min(max(evidence / upper, evidence / lower, share, 0.0), 1.0)
        low, high = max(effect - half, -self.spread), min(effect + half, self.spread)
        return Look(verdict, effect, low, high, evidence, progress, counts)

    def _pooled_error(self, current: Observed, candidate: Observed) -> float:
        """Estimated variance of the effect, as if both arms varied alike."""
        # One score too many, half a spread off the mean: while all are equal, nobody knows how they vary.
        squares = current.deviations + candidate.deviations + self.spread**2 / 4
        return squares / (current.count + candidate.count - 1) * (1 / current.count + 1 / candidate.count)


def own_error(current: Observed, candidate: Observed, spread: float) -> float:
    """Estimated variance of the difference of two means, each by the scores of its own arm. Both need a score.

    Args:
        spread: distance between the least and the greatest score.
    """
    # One score too many in each, half a spread off its mean, as above.
    return sum((arm.deviations + spread**2 / 4) / arm.count**2 for arm in (current, candidate))


def half_width(error: float, gain: float, alpha: float) -> float:
    """Half of the width of an interval that covers the true effect at all looks together with 1 - alpha.

    Args:
        error: variance of the effect.
        gain: effect about which the interval is narrowest.
        alpha: two-sided.
    """
    prior = gain**2
    wide = error + prior
    return math.sqrt(error * wide / prior * (math.log(wide / error) - 2 * math.log(alpha)))
