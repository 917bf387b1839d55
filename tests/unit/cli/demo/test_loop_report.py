"""Report of the demo's loop: figures, goals, text and plot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.demo.loop.learner import Ended
from cli.demo.loop.report import Cycle, LoopReport, Trial, markdown, rows, save_plot
from cli.demo.loop.traffic import Visit


def a_cycle(number: int, outcome: str, *, effect: float | None = 0.3, why: str = "better") -> Cycle:
    candidate = None if outcome == "rejected" else f"visitors@{number}"
    return Cycle(
        Ended(number, outcome, why, candidate, effect, 200), number * 10.0, number * 10.0 + 5, number * 10.0 + 9
    )


def visits() -> list[Visit]:
    honest = [Visit(at, "base" if at < 20 else "visitors@1", 1.0 if at % 4 or at > 20 else -1.0) for at in range(100)]
    return [*honest, *(Visit(100.0 + at, "visitors@1", -1.0, troll=True) for at in range(10))]


@pytest.fixture
def report() -> LoopReport:
    return LoopReport(
        seed=1,
        before=0.1,
        after=0.8,
        cycles=[a_cycle(1, "promoted"), a_cycle(2, "promoted"), a_cycle(3, "rolled_back")],
        poisoned=a_cycle(4, "rejected", effect=None, why="skill-dates@1 1.00 → 0.10"),
        trial=Trial("visitors@4", "rolled_back", "not better", 60.0, 80.0, visits=400, exposed=24),
        visits=visits(),
        seconds=200.0,
    )


def test_goals_are_reached(report: LoopReport) -> None:
    assert report.missed() == []
    assert report.gain == pytest.approx(0.7)
    assert report.trial.exposure == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"after": 0.35}, "the satisfaction rose by 0.25"),
        ({"cycles": [a_cycle(1, "promoted"), a_cycle(2, "rolled_back")]}, "1 versions were promoted"),
        ({"poisoned": a_cycle(4, "promoted")}, "the poisoned data were promoted"),
        ({"trial": Trial("v@4", "promoted", "", 0.0, 1.0, 400, 20)}, "the bad version is promoted"),
        ({"trial": Trial("v@4", "rolled_back", "", 0.0, 1.0, 400, 44)}, "11% of the requests reached"),
    ],
)
def test_a_goal_that_is_missed_is_told(report: LoopReport, change: Mapping[str, Any], says: str) -> None:
    (told,) = replace(report, **change).missed()
    assert says in told


def test_versions_are_rated_by_visitors_without_trolls(report: LoopReport) -> None:
    assert [(version, count) for version, count, _ in report.versions()] == [("base", 20), ("visitors@1", 80)]
    assert [mean for *_, mean in report.versions()] == [pytest.approx(0.5), pytest.approx(0.975)]


def test_json_has_the_figures(report: LoopReport, tmp_path: Path) -> None:
    report.write(tmp_path / "r.json")
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["gain"] == pytest.approx(0.7)
    assert [cycle["ended"]["outcome"] for cycle in written["cycles"]] == ["promoted", "promoted", "rolled_back"]
    assert written["bad_version"]["exposure"] == 0.06
    assert written["visits"] == 110
    assert [one["version"] for one in written["by_version"]] == ["base", "visitors@1"]
    assert written["missed"] == []


def test_the_text_has_what_decided(report: LoopReport) -> None:
    text = markdown(report, Path("somewhere/demo-loop.png"))
    assert "Satisfaction +0.10 → +0.80" in text
    assert "Every goal is reached" in text
    assert "(demo-loop.png)" in text
    assert "| 4 | - | rejected | skill-dates@1 1.00 → 0.10 |" in text
    assert "it answered 24 of 400 visitors (6.0%)" in text
    assert rows(report)[0] == ("1", "visitors@1", "promoted", "200 visitors: +0.30")


@pytest.mark.parametrize("seen", [0, 1, 110])
def test_png(report: LoopReport, tmp_path: Path, seen: int) -> None:
    save_plot(replace(report, visits=report.visits[:seen]), tmp_path / "r.png")
    header = (tmp_path / "r.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(header[16:20]), int.from_bytes(header[20:24])) == (1200, 660)
