"""The benchmark of several engines at its smallest, on processors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gateway import several_engines


@pytest.mark.thorough
def test_one_engine_and_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "lines.jsonl"
    smallest = ["--cases", "2x16x8", "--steps", "10", "--tokens", "32", "--clients", "1"]
    options = ["--model", "models/tiny", "--device", "cpu", *smallest, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["several_engines", *options])
    several_engines.main()
    one, two, shared = map(json.loads, out.read_text().splitlines())
    assert [(line["engines"], line["c"]) for line in (one, two)] == [(1, 2), (2, 4)]
    assert one["times"] == 1.0
    assert two["times"] == pytest.approx(two["decode_tok_s"] / one["decode_tok_s"], rel=1e-3)
    assert (shared["job"], shared["serving"]) == ("succeeded", 2)
    assert sum(shared["killed"]["answers"].values()) == 4
