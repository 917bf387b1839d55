"""benchmarks.prefix_cache.journal_cost at its smallest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.prefix_cache import journal_cost


def test_a_line_of_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(sys, "argv", ["journal_cost", "--requests", "3", "--tokens", "48", "--out", str(out)])
    journal_cost.main()
    line = json.loads(out.read_text())
    assert line["tokens"] == 48
    assert line["loop_us"] > 0
    assert line["publisher_us"] > 0
