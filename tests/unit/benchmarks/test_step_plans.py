"""Step plans as lines."""

from __future__ import annotations

from benchmarks.lib.cases import Case
from benchmarks.lib.in_process import InProcessEngine
from benchmarks.serving.step_plans import describe, dump
from services.engine.settings import EngineSettings
from tests.stack import ROOT


def test_a_case_is_prefilled_and_decoded() -> None:
    engine = InProcessEngine(EngineSettings(model=ROOT / "models" / "tiny"))
    try:
        lines = [describe(plan) for plan in dump(engine, Case(2, 40, 3))]
    finally:
        engine.stop()
    assert "prefill" in lines[0]
    assert lines[-1].startswith("2 tokens; decode ")
