"""benchmarks.training.merge on the tiny shape: every matrix of the model is counted, whatever part of them is
merged."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.lib.random_checkpoint import TINY
from benchmarks.training import merge
from services.engine.models.lora.targets import target_shapes
from services.engine.models.qwen3_5.config import Qwen3_5Config


@pytest.mark.parametrize("matrices", [1, None])
@pytest.mark.parametrize("method", ["svd", "ties"])
def test_the_whole_is_counted_up(method: str, matrices: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.loads(Path(TINY, "config.json").read_text())
    monkeypatch.setattr(merge, "config_of", lambda shape: data)
    options = argparse.Namespace(shape="tiny", device="cpu", rank=2, decay=0.75, matrices=matrices)
    line = merge.measure(options, method, 2)
    shapes = target_shapes(Qwen3_5Config.from_dict(data))
    assert sum(kind["count"] for kind in line["kinds"].values()) == len(shapes)
    assert {tuple(kind["shape"]) for kind in line["kinds"].values()} == set(shapes.values())
    counted = sum(kind["count"] * kind["seconds"] for kind in line["kinds"].values())
    assert line["whole_seconds"] == pytest.approx(counted, abs=0.051)
    assert all(0 < kind["error"] < 1 for kind in line["kinds"].values())
    assert (line["planned_gb"] > 0) == (method == "ties")
