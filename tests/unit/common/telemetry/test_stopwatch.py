from __future__ import annotations

import os
from pathlib import Path

from services.common.telemetry.stopwatch import Stopwatch, process_seconds, rate


def test_laps_follow_each_other() -> None:
    now = [10.0]
    watch = Stopwatch(lambda: now[0])
    now[0] = 11.257
    assert watch.lap() == 1.26
    now[0] = 13.0
    assert watch.lap() == 1.74
    assert watch.lap() == 0.0


def test_seconds_of_a_process_count_from_its_own_start(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    assert process_seconds(tmp_path) is None
    (tmp_path / "uptime").write_text("1000.50 3000.00\n")
    ticks = 990 * os.sysconf("SC_CLK_TCK")
    behind = " ".join(["S", *["0"] * 18, str(ticks), "0", "0"])
    (tmp_path / "self/stat").write_text(f"77 (a name) with) spaces) {behind}\n")
    assert process_seconds(tmp_path) == 10.5
    (tmp_path / "self/stat").write_text("77 (cut) S")
    assert process_seconds(tmp_path) is None


def test_a_rate_is_in_gigabytes() -> None:
    assert rate(8_400_000_000, 1.6) == 5.25
    assert rate(1_000_000, 0.0) == 0.1
