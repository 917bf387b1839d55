"""The sequential test against its formulas, and against what it promises."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.quality.canaries import right_answers, uneven_scores
from services.common.evaluation.statistics.sequential import LEAST, Observed, SequentialTest

SCORES = st.lists(st.floats(-1, 1), max_size=40)


def right(count: int, share: float) -> Observed:
    """Answers of which a share is right."""
    return Observed.of([1.0] * round(count * share) + [0.0] * (count - round(count * share)))


@given(SCORES, SCORES)
def test_sums_of_parts_add_up(first: list[float], second: list[float]) -> None:
    both = Observed.of(first) + Observed.of(second)
    whole = Observed.of([*first, *second])
    assert both.count == whole.count
    assert (both.mean, both.deviations) == pytest.approx((whole.mean, whole.deviations), abs=1e-9)


def test_evidence_is_the_ratio_of_two_normal_likelihoods() -> None:
    current, candidate = right(400, 0.5), right(100, 0.6)
    look = SequentialTest(0.05).look(current, candidate)
    variance = (current.deviations + candidate.deviations + 0.25) / 499
    error = math.sqrt(variance / 400 + variance / 100)

    def density(mean: float) -> float:
        return math.exp(-(((0.1 - mean) / error) ** 2) / 2)

    assert look.evidence == pytest.approx(math.log(density(0.05) / density(0)))
    assert look.effect == pytest.approx(0.1)
    assert look.observed == (400, 100)


@given(st.integers(0, 200), st.integers(0, 200), st.floats(0, 1), st.floats(0, 1))
def test_any_look_has_an_answer(currents: int, candidates: int, old: float, new: float) -> None:
    look = SequentialTest(0.05).look(right(currents, old), right(candidates, new))
    assert -1 <= look.low <= look.effect <= look.high <= 1
    assert 0 <= look.progress <= 1
    assert look.verdict == "open" or min(look.observed) >= LEAST
    assert look.verdict != "better" or look.effect > 0.025


def test_equal_scores_decide_nothing_in_favour() -> None:
    test = SequentialTest(0.05)
    for count in (LEAST, 100, 10_000):
        assert test.look(right(count, 1), right(count, 1)).verdict != "better"
    assert test.look(right(LEAST, 0), right(LEAST, 1)).verdict == "better"


def test_it_ends() -> None:
    """Half of the gain favours neither hypothesis: only the end of the test ends it."""
    test = SequentialTest(0.05)
    answers, look = 1000, test.look(right(1000, 0.5), right(1000, 0.525))
    assert look.verdict == "open"
    while look.verdict == "open":
        answers += 1000
        look = test.look(right(answers, 0.5), right(answers, 0.525))
    assert (look.verdict, look.progress) == ("not better", 1.0)
    assert answers / 2 / 0.25 > 2 * test.fixed_information


def test_promises_hold_in_simulation() -> None:
    same, worse, better = (right_answers(0.6, difference, 0.1, 400) for difference in (0.0, -0.05, 0.05))
    assert same["promoted"] <= 0.05 + 2 * 0.011  # two standard errors
    assert worse["stopped"] >= 0.95
    assert worse["exposure_p50"] <= 0.2
    assert better["promoted"] >= 0.8 - 2 * 0.02
    assert min(one["covered"] for one in (same, worse, better)) >= 0.95


def test_a_candidate_that_is_liked_now_and_hated_then_is_not_promoted_by_chance() -> None:
    """Nor one whose few answers happen to be alike: their variance is a guess."""
    assert uneven_scores(0.0, 0.1, 400)["promoted"] <= 0.05 + 2 * 0.011
    assert right_answers(0.9, 0.0, 0.1, 400)["promoted"] <= 0.05 + 2 * 0.011


@pytest.mark.parametrize(
    "settings",
    [{"gain": 0.0}, {"gain": 2.0}, {"gain": 0.1, "alpha": 0.6}, {"gain": 0.1, "power": 0.4}, {"gain": math.nan}],
)
def test_a_test_that_decides_nothing_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"gain|alpha"):
        SequentialTest(**settings)
