"""Decisions of gates: what they promise, in simulation, and the test around a margin against exact ones."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache

import pytest
from pydantic import ValidationError

from services.common.adapters.evidence import ConditionKind
from services.common.evaluation.gates.decision import Decision, Measured, decide
from services.common.evaluation.gates.divergence import bounded
from services.common.evaluation.runs.records import RunSuite
from services.common.evaluation.statistics.margins import exceeds, items_needed
from services.common.evaluation.statistics.scores import Scores
from services.common.evaluation.suites.spec import SuiteSampling
from services.common.jobs.fields.acceptance import PublishIf
from services.common.jobs.fields.gates import Need

ALPHA, DRAWS = 0.05, 2000
Shares = tuple[float, float]
"""Shares of the items that only the first side, and only the second side, has right."""


def suite(better: str = "higher", items: int = 2) -> RunSuite:
    return RunSuite(suite="s@1", digest="d", items=items, scorer="exact", better=better, sampling=SuiteSampling())


@cache
def right_or_wrong(kind: ConditionKind, at_least: float, items: int, worse: int, better: int) -> Measured:
    before = [1.0] * worse + [0.0] * better + [1.0] * (items - worse - better)
    after = [0.0] * worse + [1.0] * better + [1.0] * (items - worse - better)
    return Measured(suite(), kind, at_least, Scores(before), Scores(after))


def counts(rng: random.Random, items: int, shares: Shares) -> tuple[int, int]:
    drawn = [rng.random() for _ in range(items)]
    worse = sum(one < shares[0] for one in drawn)
    return worse, sum(one < sum(shares) for one in drawn) - worse


def promoted(
    conditions: Sequence[tuple[ConditionKind, float, Shares]], *, items: int, need: Need = "all", draws: int = DRAWS
) -> float:
    """Share of draws in which a gate lets a result pass whose true shares are these."""

    @cache
    def passes(*drawn: tuple[int, int]) -> bool:
        measured = [
            right_or_wrong(kind, at_least, items, *found)
            for (kind, at_least, _), found in zip(conditions, drawn, strict=True)
        ]
        return decide(measured, need=need, alpha=ALPHA).passed

    rng = random.Random(7)
    return sum(passes(*(counts(rng, items, shares) for _, _, shares in conditions)) for _ in range(draws)) / draws


@pytest.mark.parametrize(
    ("conditions", "need"),
    [
        # No gain, with many answers that differ; exactly the gain that must be exceeded; exactly the loss that must be
        # ruled out, by rare losses alone (the hardest case) and among gains.
        ([("gain", 0.0, (0.15, 0.15))], "all"),
        ([("gain", 0.1, (0.05, 0.15))], "all"),
        ([("no_loss", -0.05, (0.05, 0.0))], "all"),
        ([("no_loss", -0.05, (0.15, 0.1))], "all"),
        # A true gain on one suite does not carry a loss on the other; of several suites none gains.
        ([("gain", 0.0, (0.0, 0.4)), ("no_loss", -0.05, (0.1, 0.05))], "all"),
        ([("gain", 0.0, (0.2, 0.2))] * 3, "any"),
    ],
)
def test_false_promotions_are_as_rare_as_promised(
    conditions: list[tuple[ConditionKind, float, Shares]], need: Need
) -> None:
    assert promoted(conditions, items=60, need=need, draws=DRAWS) <= ALPHA


def test_false_promotions_of_graded_scores_in_groups_are_as_rare() -> None:
    """Losses are rare and large, which flips of signs around the margin take for certainty."""
    rng = random.Random(3)

    def passes() -> bool:
        losses = [rng.random() < 0.05 for _ in range(30)]  # of whole groups of two items, of all of their score
        before = [0.6, 0.8] * 30
        after = [value * (not losses[place // 2]) for place, value in enumerate(before)]
        groups = [str(place // 2) for place in range(60)]
        first, second = (Scores(values, groups=groups) for values in (before, after))
        return exceeds(second.minus(first), -0.05 * 0.7, -1.0) <= ALPHA

    assert sum(passes() for _ in range(DRAWS)) / DRAWS <= ALPHA


@pytest.mark.parametrize(
    ("conditions", "need", "at_least"),
    [
        ([("gain", 0.0, (0.02, 0.3))], "all", 0.95),
        ([("gain", 0.1, (0.02, 0.4))], "all", 0.9),
        ([("no_loss", -0.1, (0.01, 0.01))], "all", 0.9),
        ([("gain", 0.0, (0.02, 0.3)), ("no_loss", -0.1, (0.01, 0.01))], "all", 0.85),
        ([("gain", 0.0, (0.0, 0.0)), ("gain", 0.0, (0.02, 0.4))], "any", 0.95),
    ],
)
def test_what_is_better_passes(
    conditions: list[tuple[ConditionKind, float, Shares]], need: Need, at_least: float
) -> None:
    assert promoted(conditions, items=60, need=need, draws=200) >= at_least


@pytest.mark.parametrize(("items", "lost", "margin"), [(60, 0, 0.05), (200, 3, 0.05), (40, 6, 0.2), (5, 1, 0.5)])
def test_the_test_around_a_margin_is_the_binomial_one_where_nothing_is_gained(
    items: int, lost: int, margin: float
) -> None:
    exact = sum(math.comb(items, k) * margin**k * (1 - margin) ** (items - k) for k in range(lost + 1))
    found = exceeds(Scores([-1.0] * lost + [0.0] * (items - lost)), -margin, -1.0)
    assert found == pytest.approx(exact, rel=0.02)
    assert found >= exact
    needed = items_needed(margin, ALPHA)
    fewest = [exceeds(Scores([0.0] * count), -margin, -1.0) for count in (needed - 1, needed)]
    assert fewest[1] <= ALPHA < fewest[0]


def test_the_test_around_a_margin_is_that_of_uniform_weights() -> None:
    values = [0.4, 0.3, -0.6, 0.25, 0.1, 0.0]
    rng = random.Random(1)
    shifted = [value - 0.02 for value in (*values, -1.0)]
    drawn = sum(sum(value * rng.expovariate(1.0) for value in shifted) <= 0 for _ in range(20_000)) / 20_000
    assert exceeds(Scores(values), 0.02, -1.0) == pytest.approx(drawn, abs=0.015)
    assert exceeds(Scores([0.02] * 4), 0.02, -1.0) == 1.0
    with pytest.raises(ValueError, match="not below the margin"):
        exceeds(Scores(values), -1.0, -1.0)


def test_levels_of_several_suites_are_holms() -> None:
    """p of 4, 6 and 7 items that are all better: 1/16, 1/64, 1/128."""
    gains = [right_or_wrong("gain", 0.0, 20, 0, better) for better in (4, 6, 7)]
    found = decide(gains, need="any", alpha=0.05)
    assert [round(one.alpha, 4) for one in found.conditions] == [0.05, 0.025, 0.0167]
    assert [one.passed for one in found.conditions] == [False, True, True]
    assert found.passed
    assert not decide(gains, need="all", alpha=0.05).passed
    # One that does not pass at its level stops all behind it, and a loss decides whatever is gained.
    stopped = decide(gains[:2], need="any", alpha=0.03)
    assert [one.passed for one in stopped.conditions] == [False, False]
    lost = right_or_wrong("no_loss", -0.05, 20, 3, 0)
    assert not decide([*gains, lost], need="any", alpha=0.05).passed


def test_lower_is_better_where_the_scorer_says_so() -> None:
    before, after = Scores([2.0, 2.5, 3.0, 2.2, 2.8, 2.6]), Scores([1.5, 2.1, 2.7, 1.9, 2.3, 2.2])

    def of(first: Scores, second: Scores, at_least: float) -> Decision:
        kind: ConditionKind = "gain" if at_least >= 0 else "no_loss"
        return decide([Measured(suite("lower", 6), kind, at_least, first, second)], need="all", alpha=0.05)

    found = of(before, after, 0.0).conditions[0]
    assert (found.passed, found.test, found.better) == (True, "sign-flip", 6)
    assert found.gain == pytest.approx(2.4 / 6)
    assert of(before, after, -0.1).passed
    assert not of(after, before, 0.0).passed
    assert not of(after, before, -0.1).passed
    assert not of(before, after, 0.5).passed


def test_a_divergence_is_weighed_by_tokens_and_bounded_by_its_upper_end() -> None:
    values = Scores([0.1, 0.4, 0.1, 0.4], [300.0, 100.0, 300.0, 100.0], ["a", "b", "c", "d"])
    found = bounded(values, tokens=800, max_kl=1.0)
    assert (found.kl, found.prompts, found.tokens, found.passed) == (pytest.approx(0.175), 4, 800, True)
    low, high = found.interval
    assert 0.1 <= low < found.kl < high <= 0.4
    assert not bounded(values, tokens=800, max_kl=(found.kl + high) / 2).passed, "it is not shown to be below"
    assert "at most 0.01 not shown" in bounded(values, tokens=800, max_kl=0.01).summary
    drawn = [0.01 * number for number in range(20)]
    apart, pairs = (
        Scores([one for one in drawn for _ in range(2)]),
        [str(number) for number in range(20) for _ in range(2)],
    )
    together = Scores(apart.values, None, pairs)
    widths = [high - low for low, high in (bounded(one, tokens=1, max_kl=1.0).interval for one in (apart, together))]
    assert widths[0] < 0.8 * widths[1], "items of a group say much the same"


def test_a_bound_of_the_divergence_needs_suites() -> None:
    with pytest.raises(ValidationError, match="max_kl is of suites"):
        PublishIf.model_validate({"metric": "eval_loss", "max_kl": 0.1})
    gate = PublishIf.model_validate({"no_loss": [{"suite": "s@1", "max_loss": 0.1}]})
    assert "max_kl" not in gate.model_dump(), "earlier releases do not know it"
