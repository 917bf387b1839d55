"""What the demo writes: JSON, PNG, table and terminal plot."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from cli.demo.report import Report, Round, save_plot, table, terminal_plot
from cli.demo.stack import report_path
from cli.output import CliError


def a_round(number: int) -> Round:
    return Round(
        round=number,
        sampled_by=None if number == 1 else f"dates@{number - 1}",
        adapter=f"dates@{number}",
        reward_sampled=0.4 + number / 10,
        reward_held_out=0.6 + number / 10,
        seconds_sampling=1.5,
        seconds_training=2.5,
    )


@pytest.fixture
def report() -> Report:
    return Report(
        reward_before=0.45,
        reward_after=0.9,
        rounds=[a_round(1), a_round(2), a_round(3)],
        adapter_versions=["dates@1", "dates@2", "dates@3", "motto@1"],
        sft={"adapter": "motto@1", "question": "?", "before": "a", "after": "b"},
        held_out_items=64,
        seed=1,
        seconds=80.0,
    )


def rendered(report: Report, *, terminal: bool) -> str:
    console = Console(
        file=io.StringIO(), width=80, force_terminal=terminal, color_system="truecolor" if terminal else None
    )
    console.print(table(report))
    console.print(terminal_plot(report, console))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_json_has_every_field(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path / "r.json")
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["reward_before"] == 0.45
    assert written["reward_after"] == 0.9
    assert written["gain"] == pytest.approx(0.45)
    assert written["adapter_versions"][-1] == "motto@1"
    assert [entry["adapter"] for entry in written["rounds"]] == ["dates@1", "dates@2", "dates@3"]
    assert written["rounds"][0]["sampled_by"] is None
    assert written["seconds"] == 80.0


def test_table_and_plot_fit_a_narrow_terminal(report: Report) -> None:
    plain = rendered(report, terminal=False)
    assert "\x1b[" not in plain
    assert max(map(len, plain.splitlines())) <= 80
    for text in ("base model", "dates@3", "0.90", "reward per round of GRPO", "held out, greedy", "1.00"):
        assert text in plain
    assert "\x1b[" in rendered(report, terminal=True)


def test_plots_do_not_pile_up(report: Report) -> None:
    assert rendered(report, terminal=False) == rendered(report, terminal=False)


def test_png(report: Report, tmp_path: Path) -> None:
    save_plot(report, tmp_path / "r.png")
    header = (tmp_path / "r.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(header[16:20]), int.from_bytes(header[20:24])) == (960, 600)


def test_output_must_be_a_directory(tmp_path: Path) -> None:
    assert report_path(tmp_path, "json") == tmp_path / "demo-report.json"
    with pytest.raises(CliError, match="--output"):
        report_path(tmp_path / "missing", "json")
