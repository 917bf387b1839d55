"""The host's cost of a step can be measured without a model."""

from __future__ import annotations

from benchmarks.serving.host_step import measure


def test_every_part_of_a_step_is_timed() -> None:
    figures = measure(sequences=2, steps=20)
    assert figures.keys() == {"plan", "tokens", "update", "other", "publish", "total", "total_p99"}
    assert figures["total"] > 0
