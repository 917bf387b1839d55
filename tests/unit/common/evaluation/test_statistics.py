"""Statistics of scores against published values, against exact enumeration, and against what they promise."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.evaluation.statistics.bootstrap import Bootstrap, Kind
from services.common.evaluation.statistics.comparison import compare, mcnemar, sign_flip, tango
from services.common.evaluation.statistics.intervals import estimate, wilson, wilson_of
from services.common.evaluation.statistics.power import smallest_difference, smallest_gain
from services.common.evaluation.statistics.quantiles import student_t
from services.common.evaluation.statistics.samples import majority_at_k, mean_of_samples, pass_at_k
from services.common.evaluation.statistics.scores import Scores

SCORES = st.lists(st.sampled_from((0.0, 0.25, 0.5, 1.0)), min_size=2, max_size=12)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17, 1998, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_has_the_published_ends(right: int, count: int, low: float, high: float) -> None:
    interval = wilson_of(Scores([1.0] * right + [0.0] * (count - right)))
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423), (120, 1.9799)],
)
def test_students_t_has_the_quantiles_of_the_tables(degrees: int, quantile: float) -> None:
    assert student_t(0.975, degrees) == pytest.approx(quantile, rel=2e-3)
    assert student_t(0.025, degrees) == pytest.approx(-quantile, rel=2e-3)


def test_wilsons_interval_covers_what_it_says() -> None:
    """Counted out over every outcome, averaged over the shares: single shares swing, for counts are whole."""
    covered = []
    for count in (50, 200):
        for share in (index / 40 for index in range(2, 39)):
            ends = [wilson(right / count, count) for right in range(count + 1)]
            covered.append(
                sum(
                    math.comb(count, right) * share**right * (1 - share) ** (count - right)
                    for right, interval in enumerate(ends)
                    if interval.low <= share <= interval.high
                )
            )
    assert 0.935 <= sum(covered) / len(covered) <= 0.965


def test_mcnemar_is_the_binomial_test_and_never_promotes_more_often_than_alpha() -> None:
    assert mcnemar(10, 2) == pytest.approx(2 * 79 / 4096)  # 1 + 12 + 66 ways of 12 fair coins
    assert mcnemar(10, 2, "better") == pytest.approx(79 / 4096)
    assert mcnemar(2, 10, "better") == pytest.approx(1 - 13 / 4096)
    assert mcnemar(0, 0) == 1.0
    for count in range(200):
        chances = [math.comb(count, better) / 2**count for better in range(count + 1)]
        promoted = sum(c for b, c in enumerate(chances) if mcnemar(b, count - b, "better") <= 0.05)
        assert promoted <= 0.05


def test_the_sign_flip_test_is_mcnemars_on_independent_items_of_0_and_1() -> None:
    differences = Scores([1.0] * 9 + [-1.0] * 3 + [0.0] * 20)
    for alternative in ("two-sided", "better", "worse"):
        assert sign_flip(differences, alternative) == pytest.approx(mcnemar(9, 3, alternative))


@given(st.lists(st.sampled_from((-1.0, -0.3, 0.0, 0.1, 0.2, 1.0)), min_size=1, max_size=9))
def test_the_sign_flip_test_counts_every_choice_of_signs(values: list[float]) -> None:
    seen = abs(math.fsum(values))
    flipped = [
        abs(math.fsum(map(math.prod, zip(values, signs, strict=True))))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    wanted = sum(value >= seen - 1e-9 for value in flipped) / len(flipped)
    assert sign_flip(Scores(values)) == pytest.approx(wanted)


def test_drawn_signs_agree_with_the_normal_test() -> None:
    """For so many scores, the test of the mean with the normal distribution."""
    draw = random.Random(5)
    values = [draw.gauss(0.06, 0.2) for _ in range(80)]
    mean = math.fsum(values) / 80
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / 79 / 80)
    normal = 2 * (1 - NormalDist().cdf(abs(mean / error)))
    assert sign_flip(Scores(values), bootstrap=Bootstrap(draws=10_000)) == pytest.approx(normal, abs=0.01)


def test_items_of_a_group_count_together() -> None:
    """Five copies of each item say what the item said: no more, and no less."""
    draw = random.Random(1)
    alone = [float(draw.random() < 0.7) for _ in range(60)]
    other = [float(draw.random() < 0.6) for _ in range(60)]
    groups = [str(index) for index in range(60) for _ in range(5)]
    copies = [Scores([value for value in values for _ in range(5)], groups=groups) for values in (alone, other)]
    width = wilson_of(Scores(alone)).high - wilson_of(Scores(alone)).low
    copied = wilson_of(copies[0])
    assert copied.high - copied.low == pytest.approx(width, rel=0.05)
    as_if_independent = wilson_of(Scores(copies[0].values))
    assert copied.high - copied.low > 2 * (as_if_independent.high - as_if_independent.low)
    compared = compare(*copies)
    assert compared.test == "sign-flip"
    assert compared.p == pytest.approx(compare(Scores(alone), Scores(other)).p)


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_equal_scores_still_have_an_interval_as_wide_as_their_groups_are_few(right: float) -> None:
    grouped = wilson_of(Scores([right] * 100, groups=["a"] * 50 + ["b"] * 50))
    single = wilson(right, 2)
    assert (grouped.low, grouped.high) == (single.low, single.high)


def test_weights_count() -> None:
    scores = Scores([1.0, 0.0, 1.0], weights=[2.0, 1.0, 1.0])
    assert scores.mean == 0.75
    assert scores.effective_items == pytest.approx(16 / 6)
    doubled = Scores([1.0, 0.0, 1.0], weights=[4.0, 2.0, 2.0])
    assert wilson_of(scores).low == pytest.approx(wilson_of(doubled).low)
    even = [1.0, 0.0] * 20
    assert wilson_of(Scores(even, weights=[3.0] * 40)) == wilson_of(Scores(even))


@given(SCORES, SCORES)
def test_comparisons_turn_around_with_the_targets(left: list[float], right: list[float]) -> None:
    size = min(len(left), len(right))
    first, second = Scores(left[:size]), Scores(right[:size])
    draws = Bootstrap(draws=100)
    there, back = compare(first, second, bootstrap=draws), compare(second, first, bootstrap=draws)
    assert there.effect == pytest.approx(-back.effect)
    assert there.p == pytest.approx(back.p)
    assert (there.better, there.worse) == (back.worse, back.better)
    assert there.interval.low <= there.effect + 1e-9
    assert there.effect <= there.interval.high + 1e-9
    one_sided = compare(first, second, alternative="better", bootstrap=draws).p
    assert one_sided + compare(first, second, alternative="worse", bootstrap=draws).p >= 1 - 1e-9


def test_a_target_that_is_compared_with_itself_differs_by_nothing_and_the_interval_is_not_a_point() -> None:
    scores = Scores([1.0, 0.0] * 50)
    same = compare(scores, scores)
    assert (same.effect, same.p, same.better, same.worse) == (0.0, 1.0, 0, 0)
    assert same.interval.low < 0 < same.interval.high
    real = Scores([0.2, 0.7] * 50)
    assert compare(real, real).sees is None


@pytest.mark.parametrize(("better", "worse", "count"), [(21, 5, 100), (0, 3, 40), (7, 7, 30), (0, 0, 25)])
def test_tangos_interval_ends_where_the_score_of_the_most_likely_shares_does(
    better: int, worse: int, count: int
) -> None:
    interval = tango(better, worse, count)
    for end in (interval.low, interval.high):
        # The likelihood of the shares (worse: q, better: q + end), searched instead of solved.
        shares = [max(0.0, -end) + step * (1 - abs(end)) / 2 / 20_000 for step in range(1, 20_000)]

        def likelihood(q: float, end: float = end) -> float:
            return (
                better * math.log(q + end) + worse * math.log(q) + (count - better - worse) * math.log(1 - 2 * q - end)
            )

        q = max(shares, key=likelihood)
        score = (better - worse - count * end) / math.sqrt(count * (2 * q + end * (1 - end)))
        assert abs(score) == pytest.approx(1.959964, abs=2e-3)


@pytest.mark.parametrize("kind", ["percentile", "bca"])
def test_bootstrap_intervals_of_the_mean_cover_what_they_say(kind: Kind) -> None:
    """Skewed scores; the whole simulation is benchmarks/quality/statistics.py."""
    draw = random.Random(3)
    covered = 0
    for turn in range(300):
        scores = Scores([draw.betavariate(2, 5) for _ in range(40)])
        found = estimate(scores, kind=kind, bootstrap=Bootstrap(200, seed=turn)).interval
        covered += found.low <= 2 / 7 <= found.high
    # ± 3 standard errors of 300 draws, and the error of 200 replicates.
    assert 0.905 <= covered / 300 <= 0.985


def test_false_promotions_of_grouped_real_scores_stay_within_alpha() -> None:
    draw = random.Random(4)
    groups = [str(index // 3) for index in range(45)]
    promoted = 0
    for turn in range(300):
        shared = [draw.gauss(0, 0.2) for _ in range(15)]
        first = Scores([draw.random() for _ in range(45)], groups=groups)
        second = Scores([value + shared[i // 3] for i, value in enumerate(first.values)], groups=groups)
        promoted += sign_flip(second.minus(first), "better", Bootstrap(200, seed=turn)) <= 0.05
    assert promoted / 300 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)


def test_intervals_are_the_same_each_time() -> None:
    scores = Scores([index / 37 for index in range(37)], weights=[1.0 + index % 2 for index in range(37)])
    assert estimate(scores) == estimate(scores)
    assert estimate(scores, bootstrap=Bootstrap(seed=1)) != estimate(scores)


def test_the_smallest_gain_is_found_with_the_power_that_it_says() -> None:
    """Against the exact power of McNemar's exact test, which is a little below the normal formula's."""
    items, discordant = 400, 0.2
    gain = smallest_gain(items, discordant)
    assert gain is not None
    favours = (1 + gain / discordant) / 2
    power = 0.0
    for count in range(40, 130):
        seen = math.comb(items, count) * discordant**count * (1 - discordant) ** (items - count)
        found = sum(
            math.comb(count, better) * favours**better * (1 - favours) ** (count - better)
            for better in range(count + 1)
            if mcnemar(better, count - better) <= 0.05
        )
        power += seen * found
    assert 0.74 <= power <= 0.81


def test_power_has_the_values_by_hand() -> None:
    # (1.959964 + 0.841621) · 0.01
    assert smallest_difference(0.01) == pytest.approx(0.02801585, abs=1e-7)
    # Connor's n for a gain of 0.1 at 0.3 discordant: ((1.959964 √0.3 + 0.841621 √0.29) / 0.1)² = 233.04
    assert smallest_gain(233.04, 0.3) == pytest.approx(0.1, abs=1e-4)
    assert smallest_gain(10, 0.2) is None


def test_pass_at_k_is_the_share_of_choices_with_a_pass() -> None:
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)  # 1 - C(3,2) / C(5,2)
    assert pass_at_k(4, 2, 3) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0
    with pytest.raises(ValueError, match="pass@5"):
        pass_at_k(4, 2, 5)


@given(st.lists(st.sampled_from(("a", "b", "c", None)), min_size=1, max_size=7), st.data())
def test_majority_at_k_is_the_mean_over_all_choices(answers: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    won = []
    for choice in itertools.combinations(answers, k):
        votes = Counter(answer for answer in choice if answer is not None)
        top = [answer for answer, count in votes.items() if count == max(votes.values())]
        won.append(top.count("a") / len(top) if top else 0.0)
    wanted = sum(won) / len(won)
    assert majority_at_k(answers, [answer == "a" for answer in answers], k) == pytest.approx(wanted)


def test_an_item_counts_once_however_often_it_was_answered() -> None:
    assert mean_of_samples([1.0, 0.0, 1.0, 1.0]) == 0.75
    with pytest.raises(ValueError, match="without samples"):
        mean_of_samples([])


def test_what_makes_no_sense_is_refused() -> None:
    for values, options in (
        ([], {}),
        ([math.nan], {}),
        ([1.0], {"weights": [0.0]}),
        ([1.0], {"weights": [1.0, 2.0]}),
        ([1.0], {"groups": []}),
    ):
        with pytest.raises(ValueError):
            Scores(values, **options)
    with pytest.raises(ValueError, match="one group is unknown"):
        estimate(Scores([0.5, 0.7], groups=["a", "a"]))
    with pytest.raises(ValueError, match="cannot be paired"):
        compare(Scores([1.0, 0.0]), Scores([1.0]))
    with pytest.raises(ValueError, match="differ in weights"):
        compare(Scores([1.0, 0.0]), Scores([1.0, 0.0], weights=[1.0, 2.0]))
