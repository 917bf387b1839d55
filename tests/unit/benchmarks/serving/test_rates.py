"""The serving benchmark measures what it says, on the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lib.cases import Case, milliseconds
from benchmarks.lib.in_process import InProcessEngine, Run, settings_for
from benchmarks.serving.rates import measure
from benchmarks.serving.swaps import measure_swaps
from benchmarks.serving.timeline import idle
from services.engine.requests.outputs import SampledToken, SequenceUpdate

TINY = Path(__file__).parents[4] / "models" / "tiny"


@pytest.fixture(scope="module")
def engine() -> Iterator[InProcessEngine]:
    settings = settings_for(TINY, "cpu", max_num_seqs=4, token_budget=256)
    engine = InProcessEngine(settings, adapters=2, rank=4)
    yield engine
    engine.stop()


def test_cases() -> None:
    assert Case.parse("64x512x256") == Case(64, 512, 256)
    for text in ("64x512", "0x1x2", "1x1x1", "axbxc"):
        with pytest.raises(ValueError):
            Case.parse(text)


def test_rates_follow_from_the_times(engine: InProcessEngine) -> None:
    report = measure(engine, Case(3, 20, 6))
    assert report["decode_tok_s"] == pytest.approx(3 * 5 / (report["t_out_s"] - report["t1_s"]), rel=0.05)
    assert report["prefill_tok_s"] == pytest.approx(3 * 20 / report["t1_s"], rel=0.05)
    assert report["ttft_ms"]["p50"] < 1e3 * report["t_out_s"]


def test_every_request_uses_its_adapter(engine: InProcessEngine) -> None:
    run = engine.generate(engine.prompts(3, 8), 2)
    pinned = {update.request_id: update.adapter for _, updates in run.steps for update in updates if update.adapter}
    assert [pinned[name] for name in sorted(pinned)] == ["bench-0@1", "bench-1@1", "bench-0@1"]


def test_every_request_uses_its_composition() -> None:
    settings = settings_for(TINY, "cpu", max_num_seqs=4, token_budget=256)
    engine = InProcessEngine(settings, adapters=2, rank=4, composed=2)
    try:
        run = engine.generate(engine.prompts(3, 8), 2)
    finally:
        engine.stop()
    pinned = {update.request_id: update.adapter for _, updates in run.steps for update in updates if update.adapter}
    together = ["bench-0@1+bench-1@1", "bench-2@1+bench-3@1"]
    assert [pinned[name] for name in sorted(pinned)] == [*together, together[0]]


def test_swaps_are_loaded_while_requests_decode(engine: InProcessEngine) -> None:
    report = measure_swaps(engine, Case(2, 8, 8), 3)
    assert report["swaps"] == 3
    assert report["waves"] >= 1
    assert report["p99_ratio"] > 0
    assert engine.registry.current("bench-live").version >= 3


def test_latencies() -> None:
    token = SampledToken(1, 0.0)
    steps = [(10.5, ["a", "b"]), (10.7, ["a"]), (11.5, ["a", "b"])]
    run = Run(10.0, [(now, [SequenceUpdate(name, token=token) for name in names]) for now, names in steps])
    first, between = run.latencies()
    assert run.seconds == 1.5
    assert first == [0.5, 0.5]
    assert between == pytest.approx([0.2, 0.8, 1.0])
    assert milliseconds(between) == {"p50": 800.0, "p99": 1000.0}


def test_idle_shares() -> None:
    report = idle([("a", 0.0, 4.0), ("b", 2.0, 10.0), ("a", 12.0, 20.0), ("copy", 70.0, 100.0)])
    assert report["idle_fraction"] == 0.52
    assert report["host_idle_fraction"] == 0.5
    assert report["kernel_us"]["copy"] == {"count": 1, "total": 30.0, "mean": 30.0}
    assert idle([]) == {"idle_fraction": None}
