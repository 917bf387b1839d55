"""Decisions of simulated canaries: `python -m benchmarks.quality.canaries`.

Answers of two versions are right or wrong by chance, or ("uneven") those of the current version are scored much alike,
and those of the candidate are not. The true difference is known, and the sequential test looks after every few answers
of the candidate. One JSON line a case: the share of the canaries that promoted and that stopped,
the share of the courses whose interval held the truth at every look, and the median and 95th percentile of the
candidate's answers before the decision, as a part of what a test of fixed size at the same alpha and power needs.
Goals: without a difference at most 0.05 promoted; 5 points worse, 0.95 stopped with a median exposure of 0.2; 5 points
better, 0.8 promoted. Random numbers are seeded; 2,000 canaries a case take 10 s on an idle core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.environment import environment
from benchmarks.lib.recorder import put_line
from services.common.evaluation.statistics.sequential import LEAST, Observed, SequentialTest

GAIN = 0.05
UNEVEN_GAIN = 0.1
RATES = (0.3, 0.6, 0.9)
"""Right answers of the current version."""
SHARES = (0.1, 0.5)
"""Traffic of the candidate."""
_BETWEEN_LOOKS = 7


Sums: TypeAlias = NDArray[np.float64]
"""Of the scores, and of their squares, after each answer of the candidate: [2, answers]."""
Draw: TypeAlias = Callable[[np.random.Generator, int], tuple[Sums, Sums]]
"""Sums of the current version and of the candidate, for so many answers of the candidate."""


def _right(rate: float, difference: float, each: int) -> Draw:
    """Answers that are right or wrong, ``each`` of the current version for one of the candidate."""

    def draw(chance: np.random.Generator, answers: int) -> tuple[Sums, Sums]:
        candidate = np.cumsum(chance.random(answers) < rate + difference).astype(float)
        current = np.cumsum(chance.binomial(each, rate, answers)).astype(float)
        return np.stack((current, current)), np.stack((candidate, candidate))

    return draw


def _uneven(difference: float, each: int) -> Draw:
    """See uneven_scores."""

    def draw(chance: np.random.Generator, answers: int) -> tuple[Sums, Sums]:
        candidate = np.where(chance.random(answers) < 0.5 + difference / 2, 1.0, -1.0)
        current = np.where(chance.random((answers, each)) < 0.5, 0.2, -0.2)
        squares = np.full(answers, 0.04 * each)
        return (
            np.stack((np.cumsum(current.sum(1)), np.cumsum(squares))),
            np.stack((np.cumsum(candidate), np.arange(1.0, answers + 1))),
        )

    return draw


def right_answers(rate: float, difference: float, share: float, draws: int) -> dict[str, float]:
    """How canaries end whose answers are right or wrong.

    Args:
        rate: right answers of the current version.
        share: of the candidate in the traffic.
    """
    other, each, test = rate + difference, round((1 - share) / share), SequentialTest(GAIN)
    fixed = test.fixed_information * (other * (1 - other) + rate * (1 - rate) / each)
    return _simulate(_right(rate, difference, each), test, fixed, difference, each, draws)


def uneven_scores(difference: float, share: float, draws: int) -> dict[str, float]:
    """How canaries end whose current version is scored -0.2 or 0.2, and whose candidate is liked (1) or not (-1)."""
    each, test = round((1 - share) / share), SequentialTest(UNEVEN_GAIN, spread=2.0)
    fixed = test.fixed_information * (1 - difference**2 + 0.04 / each)
    return _simulate(_uneven(difference, each), test, fixed, difference, each, draws)


def _simulate(
    draw: Draw, test: SequentialTest, fixed: float, difference: float, each: int, draws: int
) -> dict[str, float]:
    """How ``draws`` canaries end, and after how many answers.

    Args:
        fixed: answers of the candidate that a test of fixed size needs.
        each: answers of the current version for one of the candidate.
    """
    chance = np.random.default_rng(0)
    ends: list[str] = []
    exposure: list[float] = []
    covered = 0
    for _ in range(draws):
        most = int(4 * fixed) + LEAST
        current, candidate = draw(chance, most)
        holds = True
        for answers in range(LEAST, most, _BETWEEN_LOOKS):
            at = answers - 1
            look = test.look(
                Observed(answers * each, float(current[0, at]), float(current[1, at])),
                Observed(answers, float(candidate[0, at]), float(candidate[1, at])),
            )
            holds = holds and look.low <= difference <= look.high
            if look.verdict != "open":
                break
        ends.append(look.verdict)
        exposure.append(answers / fixed)
        covered += holds
    return {
        "promoted": ends.count("better") / draws,
        "stopped": ends.count("not better") / draws,
        "covered": covered / draws,
        "fixed": round(fixed),
        "exposure_p50": round(median(exposure), 4),
        "exposure_p95": round(quantiles(exposure, n=20)[-1], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000, help="canaries of each case")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    for rate in RATES:
        for share in SHARES:
            for difference in (-0.1, -GAIN, -0.025, 0.0, 0.025, GAIN, 0.09):
                found = right_answers(rate, difference, share, options.draws)
                case = {"rate": rate, "share": share, "difference": difference, "canaries": options.draws}
                put_line(case | found | environment(), options.out)
    for share in SHARES:
        for difference in (-UNEVEN_GAIN, 0.0, UNEVEN_GAIN):
            found = uneven_scores(difference, share, options.draws)
            case = {"rate": "uneven", "share": share, "difference": difference, "canaries": options.draws}
            put_line(case | found | environment(), options.out)


if __name__ == "__main__":
    main()
