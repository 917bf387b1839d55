"""Decisions of simulated canaries: `python -m benchmarks.quality.canaries`.

Answers of two versions are right or wrong by chance, the true difference is known, and the sequential test looks after
every few answers of the candidate. One JSON line a case: the share of the canaries that promoted and that stopped,
the share of the courses whose interval held the truth at every look, and the median and 95th percentile of the
candidate's answers before the decision, as a part of what a test of fixed size at the same alpha and power needs.
Goals: without a difference at most 0.05 promoted; 5 points worse, 0.95 stopped with a median exposure of 0.2; 5 points
better, 0.8 promoted. Random numbers are seeded; 2,000 canaries a case take half a minute on one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median, quantiles

import numpy as np

from benchmarks.lib.environment import environment
from benchmarks.lib.recorder import put_line
from services.common.evaluation.statistics.sequential import LEAST, Observed, SequentialTest

GAIN = 0.05
RATES = (0.3, 0.6, 0.9)
"""Right answers of the current version."""
SHARES = (0.1, 0.5)
"""Traffic of the candidate."""
_BETWEEN_LOOKS = 7


def simulate(rate: float, difference: float, share: float, draws: int) -> dict[str, float]:
    """How ``draws`` canaries end, and after how many answers."""
    chance = np.random.default_rng(0)
    test = SequentialTest(GAIN)
    each = round((1 - share) / share)
    other = rate + difference
    fixed = test.fixed_information * (other * (1 - other) + rate * (1 - rate) / each)
    ends: list[str] = []
    exposure: list[float] = []
    covered = 0
    for _ in range(draws):
        most = int(4 * fixed) + LEAST
        candidate = np.cumsum(chance.random(most) < other)
        current = np.cumsum(chance.binomial(each, rate, most))
        holds = True
        for answers in range(LEAST, most, _BETWEEN_LOOKS):
            seen = [(answers * each, float(current[answers - 1])), (answers, float(candidate[answers - 1]))]
            look = test.look(*(Observed(count, right, right) for count, right in seen))
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
                found = simulate(rate, difference, share, options.draws)
                case = {"rate": rate, "share": share, "difference": difference, "canaries": options.draws}
                put_line(case | found | environment(), options.out)


if __name__ == "__main__":
    main()
