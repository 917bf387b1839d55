"""benchmarks.training.branches on the tiny model: both ways are of the same trajectories, and compared with float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.training import branches

SIZES = {"groups": 1, "branches": 3, "prompt": 40, "turns": 1, "repeats": 1}
OPTIONS = ["--device=cpu", "--shape=tiny", *(f"--{name}={size}" for name, size in SIZES.items())]


def test_shared_and_apart_are_measured_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(branches, "_OBSERVED", 3)
    monkeypatch.setattr(branches, "_ACTED", 5)
    out = tmp_path / "line.json"
    branches.main([*OPTIONS, "--out", str(out)])
    line = json.loads(out.read_text())
    assert (line["shared"]["tokens"], line["apart"]["tokens"]) == (40 + 3 * 7, 3 * 47)
    assert line["check"]["tokens"] == {"shared": 40 + 3 * 7, "apart": 3 * 47}
    for way in ("shared", "apart"):
        errors = line["check"][way]
        assert set(errors) == {"a", "b", "logprobs"}
        assert all(0 < error < 0.3 for error in errors.values()), errors
    assert all(0 < error < 0.3 for error in line["gradients_apart_by"].values())
