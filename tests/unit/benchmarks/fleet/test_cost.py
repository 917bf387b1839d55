"""The cost model of a step, fitted to measured ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fleet.cost import DECODES, PREFILL, CostModel, MeasuredStep, read_steps

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"


def test_a_model_is_found_again_from_its_steps() -> None:
    true = CostModel(tuple(0.01 + 1e-4 * d for d in DECODES), tuple(2e-3 + 2e-5 * p for p in PREFILL), 1e-8, 1e-10)
    steps = [
        MeasuredStep(d, p, d * c, p * c, true.seconds(d, d * c, p, p * c))
        for d in (0, 1, 5, 16, 40, 64, 200, 256)
        for p in (0, 100, 700, 3000, 8000)
        for c in (300, 5000)
        if d or p
    ]
    found = CostModel.fit(steps)
    assert found.error(steps) < 0.01
    assert found.seconds(100, 1e5, 2000, 1e6) == pytest.approx(true.seconds(100, 1e5, 2000, 1e6), rel=0.02)


@pytest.mark.parametrize(
    ("file", "quant"), [("2026-11-29-h200-serving-after.jsonl", "none"), ("2026-11-28-h100-27b-fp8.jsonl", "fp8")]
)
def test_measured_steps_are_met(file: str, quant: str) -> None:
    steps = read_steps(RESULTS / file, quant)
    found = CostModel.fit(steps)
    assert found.error(steps) < 0.05
    beyond = [found.seconds(decodes, 0.0, 0, 0.0) for decodes in (64, 96, 128, 256, 300)]
    assert beyond == sorted(set(beyond)), "what nobody measured takes longer, too"


def test_a_model_in_which_more_work_is_less_time_is_refused() -> None:
    falling = (0.02, *[0.01] * (len(DECODES) - 1))
    with pytest.raises(ValueError, match="ascend"):
        CostModel(falling, (0.0,) * len(PREFILL), 0.0, 0.0)
    with pytest.raises(ValueError, match="negative"):
        CostModel((0.01,) * len(DECODES), (0.0,) * len(PREFILL), -1.0, 0.0)
