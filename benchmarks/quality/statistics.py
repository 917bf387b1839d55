"""Promises of the statistics of evaluations, in simulation: `python -m benchmarks.quality.statistics`.

Suites are drawn whose true means and differences are known. One JSON line a case:

- coverage: share of the 95 % intervals that have the true value inside, of which the goal is 0.95 ± 0.015
- promoted: share of the comparisons that call the second target better, one-sided at alpha 0.05; the goal is at most
  0.05 where it is not better, and 0.8 where it is better by the difference that the suite was said to see
- error: standard error of that share, from the number of draws

Random numbers are seeded; a run of 2,000 draws takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from benchmarks.lib.environment import environment
from benchmarks.lib.recorder import put_line
from services.common.evaluation.statistics.bootstrap import Bootstrap, Kind
from services.common.evaluation.statistics.comparison import compare
from services.common.evaluation.statistics.intervals import Interval, estimate
from services.common.evaluation.statistics.power import smallest_gain
from services.common.evaluation.statistics.scores import Scores

ALPHA = 0.05
COVERAGE = 0.95
DISCORDANT = 0.2
"""Share of the items on which two targets differ."""
SIZES = (50, 200, 1000)
_GROUP = 4


@dataclass(frozen=True, slots=True)
class Drawn:
    """Result of one draw: an interval, with the true value that it should cover, or whether there was a promotion."""

    interval: Interval | None = None
    truth: float = 0.0
    promoted: bool = False

    @property
    def covered(self) -> bool:
        return self.interval is not None and self.interval.low <= self.truth <= self.interval.high


Case: TypeAlias = Callable[[random.Random, Bootstrap], Drawn]


def right_or_wrong(items: int) -> Case:
    """Mean of 0 and 1, over suites of any difficulty."""

    def draw(chance: random.Random, bootstrap: Bootstrap) -> Drawn:
        truth = chance.uniform(0.05, 0.95)
        scores = Scores([float(chance.random() < truth) for _ in range(items)])
        return Drawn(estimate(scores, bootstrap=bootstrap).interval, truth)

    return draw


def right_or_wrong_in_groups(items: int) -> Case:
    """The same in groups of 4 items that are right or wrong together half of the time."""

    def draw(chance: random.Random, bootstrap: Bootstrap) -> Drawn:
        truth = chance.uniform(0.2, 0.8)
        values: list[float] = []
        for _ in range(items // _GROUP):
            alike = chance.random() < 0.5
            first = chance.random() < truth
            values += (float(first if alike else chance.random() < truth) for _ in range(_GROUP))
        groups = [str(index // _GROUP) for index in range(len(values))]
        return Drawn(estimate(Scores(values, groups=groups), bootstrap=bootstrap).interval, truth)

    return draw


def graded(items: int, kind: Kind) -> Case:
    """Mean of skewed scores between 0 and 1, with weights of 1 to 3."""

    def draw(chance: random.Random, bootstrap: Bootstrap) -> Drawn:
        values = [chance.betavariate(2, 6) for _ in range(items)]
        weights = [float(chance.randint(1, 3)) for _ in range(items)]
        return Drawn(estimate(Scores(values, weights), kind=kind, bootstrap=bootstrap).interval, 0.25)

    return draw


def difference(items: int, gain: float) -> Case:
    """Difference of two targets that disagree on a fifth of the items."""

    def draw(chance: random.Random, bootstrap: Bootstrap) -> Drawn:
        return Drawn(compare(*_pair(chance, items, gain), bootstrap=bootstrap).interval, gain)

    return draw


def graded_difference(items: int) -> Case:
    """Difference of graded scores whose noise is shared within groups."""

    def draw(chance: random.Random, bootstrap: Bootstrap) -> Drawn:
        return Drawn(compare(*_graded_pair(chance, items, 0.03), bootstrap=bootstrap).interval, 0.03)

    return draw


def promotion(items: int, gain: float) -> Case:
    """Promotion of a target that is better by ``gain``, on scores of 0 and 1."""

    def draw(chance: random.Random, bootstrap: Bootstrap) -> Drawn:
        found = compare(*_pair(chance, items, gain), alternative="better", bootstrap=bootstrap)
        return Drawn(promoted=found.p <= ALPHA)

    return draw


def graded_promotion(items: int) -> Case:
    """Promotion of a target that is no better, on graded scores in groups."""

    def draw(chance: random.Random, bootstrap: Bootstrap) -> Drawn:
        found = compare(*_graded_pair(chance, items, 0.0), alternative="better", bootstrap=bootstrap)
        return Drawn(promoted=found.p <= ALPHA)

    return draw


def _pair(chance: random.Random, items: int, gain: float) -> tuple[Scores, Scores]:
    first, second = [], []
    for _ in range(items):
        place = chance.random()
        if place < DISCORDANT:
            better = place < (DISCORDANT + gain) / 2
            first.append(float(not better))
            second.append(float(better))
        else:
            first.append(float(place < 0.7))
            second.append(first[-1])
    return Scores(first), Scores(second)


def _graded_pair(chance: random.Random, items: int, gain: float) -> tuple[Scores, Scores]:
    groups = [str(index // _GROUP) for index in range(items)]
    shared = [chance.gauss(gain, 0.1) for _ in range(-(-items // _GROUP))]
    first = [chance.random() for _ in range(items)]
    second = [value + shared[index // _GROUP] + chance.gauss(0, 0.1) for index, value in enumerate(first)]
    return Scores(first, groups=groups), Scores(second, groups=groups)


def cases() -> Mapping[str, tuple[Case, float | None]]:
    """Cases by name, each with the goal of its share of promotions; None: its intervals are counted."""
    found: dict[str, tuple[Case, float | None]] = {}
    for items in SIZES:
        found[f"right or wrong, {items}"] = right_or_wrong(items), None
        found[f"right or wrong in groups, {items}"] = right_or_wrong_in_groups(items), None
        found[f"graded, percentile, {items}"] = graded(items, "percentile"), None
        found[f"graded, BCa, {items}"] = graded(items, "bca"), None
        found[f"difference 0, {items}"] = difference(items, 0.0), None
        found[f"difference 0.05, {items}"] = difference(items, 0.05), None
        found[f"graded difference in groups, {items}"] = graded_difference(items), None
        found[f"false promotions, {items}"] = promotion(items, 0.0), ALPHA
        found[f"false promotions, graded in groups, {items}"] = graded_promotion(items), ALPHA
        # One-sided at alpha is two-sided at twice that.
        gain = smallest_gain(items, DISCORDANT, alpha=2 * ALPHA)
        if gain is not None:
            found[f"promotions of +{gain:.3f}, {items}"] = promotion(items, gain), 0.8
    return found


def measure(case: Case, draws: int, bootstrap_draws: int) -> dict[str, float]:
    """Share of the draws that cover, or promote, with its standard error."""
    chance = random.Random(0)
    drawn = [case(chance, Bootstrap(bootstrap_draws, seed=turn)) for turn in range(draws)]
    covers = drawn[0].interval is not None
    share = sum(one.covered if covers else one.promoted for one in drawn) / draws
    error = math.sqrt(share * (1 - share) / draws)
    return {"coverage" if covers else "promoted": round(share, 4), "error": round(error, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000, help="suites of each case")
    parser.add_argument("--bootstrap-draws", type=int, default=500)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    for name, (case, goal) in cases().items():
        if options.only in name:
            found = measure(case, options.draws, options.bootstrap_draws)
            put_line({"case": name, "goal": COVERAGE if goal is None else goal} | found | environment(), options.out)


if __name__ == "__main__":
    main()
