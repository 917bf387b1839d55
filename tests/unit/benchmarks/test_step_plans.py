"""Step plans as lines."""

from __future__ import annotations

import time

import pytest

from benchmarks.lib.cases import Case
from benchmarks.lib.in_process import InProcessEngine
from benchmarks.serving.step_plans import describe, dump
from services.engine.requests.submission import Sink, Submission
from services.engine.settings import EngineSettings
from tests.stack import ROOT


def test_a_case_is_prefilled_and_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InProcessEngine(EngineSettings(model=ROOT / "models" / "tiny"))
    submit = engine.engine.loop.submit

    def late(submission: Submission, sink: Sink) -> None:
        """Submission on a machine that is busy with something else: several steps could run meanwhile."""
        time.sleep(0.05)
        submit(submission, sink)

    monkeypatch.setattr(engine.engine.loop, "submit", late)
    try:
        lines = [describe(plan) for plan in dump(engine, Case(2, 40, 3))]
    finally:
        engine.stop()
    assert lines == [
        "80 tokens; prefill 1-0:0-40; prefill 1-1:0-40",
        "2 tokens; decode 1-0 1-1",
        "2 tokens; decode 1-0 1-1",
    ]
