"""The comparison of real engines with simulated ones: what is measured of each, and how it is told."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from benchmarks.fleet.player import Answered
from benchmarks.fleet.report import line
from benchmarks.fleet.validation.comparison import compared
from benchmarks.fleet.validation.engine import Steps
from services.engine.observability.events import StepDone
from services.engine.observability.status import Counts

ANSWERS = [
    Answered("a", asked=0.0, prompt_tokens=100, first=1.0, end=2.0, tokens=11, cached=50),
    Answered("b", asked=1.0, prompt_tokens=300, first=4.0, end=8.0, tokens=21, cached=50),
]


def test_each_quantity_has_its_error() -> None:
    slower = [replace(one, first=one.first and one.first + 0.5, cached=40) for one in ANSWERS]
    rows = compared((ANSWERS, 8.0), (slower, 10.0))
    assert rows["hit_rate"] == {"real": 0.25, "simulated": 0.2, "error": -0.2}
    assert rows["output_tokens_per_s"] == {"real": 4.0, "simulated": 3.2, "error": -0.2}
    assert rows["first_token_mean_s"] == {"real": 2.0, "simulated": 2.5, "error": 0.25}
    assert rows["between_tokens_p90_s"] == {"real": 0.2, "simulated": 0.175, "error": -0.125}
    assert "hit_rate 0.2 of 0.25 (-20.0%)" in line({"scenario": "validation", "requests": 2, "quantities": rows})


def test_an_answer_that_is_not_whole_is_no_comparison() -> None:
    with pytest.raises(RuntimeError, match="1 of 2 answers"):
        compared((ANSWERS, 8.0), ([ANSWERS[0], replace(ANSWERS[1], error="lost")], 8.0))


def test_a_step_takes_as_long_as_on_the_device() -> None:
    steps = Steps(step=0.02, decode=0.01, token=0.001)
    counts = Counts(**dict.fromkeys(Counts.__annotations__, 0))
    began = time.perf_counter()
    for decodes, prefill in ((1, 0), (2, 30)):
        steps.note(StepDone(0.0, 0.0, decodes, prefill, counts, 0))
    assert time.perf_counter() - began >= 0.03 + 0.07 - 1e-3
    assert [noted[:2] for noted in steps.noted] == [(1, 0), (2, 30)]
    assert all(noted[2] >= least - 1e-3 for noted, least in zip(steps.noted, (0.03, 0.07), strict=True))
