"""Figures of `temper adapters verify`, against their definitions."""

from __future__ import annotations

import math

import pytest

from cli.reports.verification import Movement, divergence, over_bounds


def told(**probabilities: float) -> dict[int, float]:
    return {ord(token): math.log(value) for token, value in probabilities.items()}


def test_divergence_of_whole_distributions_is_theirs() -> None:
    base, other = told(a=0.5, b=0.3, c=0.2), told(a=0.2, b=0.3, c=0.5)
    expected = 0.5 * math.log(0.5 / 0.2) + 0.2 * math.log(0.2 / 0.5)
    assert divergence(base, other) == pytest.approx(expected, abs=1e-6)
    assert divergence(base, base) == 0


def test_divergence_of_a_part_is_a_lower_bound() -> None:
    base, other = told(a=0.5, b=0.3, c=0.2), told(a=0.2, b=0.3, c=0.5)
    part = divergence(told(a=0.5, b=0.3), told(a=0.2, c=0.5))
    assert part == pytest.approx(0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8))
    assert 0 < part < divergence(base, other)


def test_figures_and_bounds() -> None:
    found = Movement()
    found.add([told(a=0.6, b=0.4), told(a=0.9, b=0.1)], [told(a=0.3, b=0.7), told(a=0.9, b=0.1)])
    figures = found.figures()
    assert (figures["tokens"], figures["agreement"]) == (2, 0.5)
    assert figures["largest_shift"] == pytest.approx(math.log(2))
    assert figures["kl_max"] == pytest.approx(2 * figures["kl_mean"])
    assert over_bounds(figures, {"agreement": 0.5, "largest_shift": 0.7, "kl_mean": None}) == []
    assert over_bounds(figures, {"agreement": 0.6, "largest_shift": 0.6}) == [
        "agreement is 0.5, under 0.6",
        "largest_shift is 0.6931, over 0.6",
    ]


def test_what_is_not_finite_or_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="not finite"):
        Movement().add([{1: math.nan}], [{1: 0.0}])
    with pytest.raises(ValueError, match="answered nothing"):
        Movement().figures()
