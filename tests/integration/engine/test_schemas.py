"""Generated JSON schemas through a real engine: every answer is valid, or its schema was refused.

All 500 are `python -m benchmarks.structured.run --schemas 500`.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.lib.in_process import InProcessEngine, settings_for
from benchmarks.structured.run import try_schemas

TINY = Path(__file__).resolve().parents[3] / "models" / "tiny"


def test_answers_to_generated_schemas_are_valid() -> None:
    engine = InProcessEngine(
        settings_for(TINY, "cpu", torch_threads=1, max_num_seqs=16, max_model_len=2048, num_blocks=1025)
    )
    try:
        report = try_schemas(engine, 20, seed=11, max_tokens=1500)
    finally:
        engine.stop()
    assert report["invalid"] == 0, report["examples"]
    assert report["valid"] + report["refused"] == 20
    assert report["refused"] <= 3, report["refusals"]
