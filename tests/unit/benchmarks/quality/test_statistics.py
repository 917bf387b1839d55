"""The simulation of the statistics runs, and finds on few draws about what it finds on many."""

from __future__ import annotations

from benchmarks.quality.statistics import SIZES, cases, measure


def test_every_case_of_the_smallest_suites_is_about_right() -> None:
    small = {name: case for name, case in cases().items() if name.endswith(f", {SIZES[0]}")}
    assert len(small) == len(cases()) // len(SIZES)
    for name, (case, goal) in small.items():
        found = measure(case, 60, 100)
        if goal is None:
            assert found["coverage"] >= 0.85, name
        elif goal < 0.5:
            assert found["promoted"] <= 0.15, name
        else:
            assert found["promoted"] >= 0.6, name
