"""The benchmark of tiers goes on with histories from where it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.prefix_cache.tier_restore import drop, resident

ROOT = Path(__file__).parents[4]


@pytest.mark.thorough
def test_every_place(tmp_path: Path) -> None:
    out = tmp_path / "tiers.jsonl"
    arguments = f"--device cpu --model models/tiny --shrink 16 --each 1 --directory {tmp_path} --out {out}"
    arguments += " --set tier_load_share=1000"  # however busy the machine
    subprocess.run(
        [sys.executable, "-m", "benchmarks.prefix_cache.tier_restore", *arguments.split()], cwd=ROOT, check=True
    )
    lines = {line["place"]: line for line in map(json.loads, out.read_text().splitlines())}
    sources = {"nowhere": [], "device": ["device"], "host": ["host"], "restart": ["host"]}
    sources |= {"page cache": ["disk"], "disk": ["disk"]}
    assert {place: list(line["from"]) for place, line in lines.items()} == sources
    for place, line in lines.items():
        assert line["requests"] == (5 if place == "nowhere" else 1)
        assert line["cached"] >= 0.9 * line["ideal"]
    assert [path.name for path in tmp_path.iterdir()] == ["tiers.jsonl"]


def test_pages_are_seen(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10 * 2**20)
    before = resident(tmp_path)
    if before is None:
        pytest.skip("the file system does not say what is in memory")
    assert before == 1.0
    drop(tmp_path)
    assert resident(tmp_path) is not None
