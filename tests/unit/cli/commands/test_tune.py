"""`temper tune`: the process that it starts, and how its result is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from cli.commands.up import DEFAULT_MODEL
from cli.main import app

RESULT = {
    "bands": [
        {"rows": 1, "microseconds": 2810.4, "gain": 0.031},
        {"rows": 64, "microseconds": 5950.0, "gain": 0.0},
    ],
    "seconds": 58.2,
    "candidates": 214,
    "file": "/cache/tuned/tuned-1.json",
}


def run(*arguments: str, result: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
    with patch("cli.commands.tune.run_tool", return_value=result or RESULT) as tool:
        done = CliRunner().invoke(app, ["tune", *arguments])
    return done, dict(tool.call_args.kwargs) if tool.called else {}


def test_gains_and_the_file_are_told() -> None:
    done, given = run("--quantization", "fp8", "--seconds", "30")
    assert done.exit_code == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[1] == ["1", "2,810", "µs", "3.1%"]
    assert lines[2] == ["64", "5,950", "µs", "-"]
    assert "214 candidates in 58 s; kept in /cache/tuned/tuned-1.json" in done.stdout
    assert given["module"] == "services.pod"
    env = given["env"]
    assert env["TEMPER_MODEL"] == str(DEFAULT_MODEL)
    assert (env["TEMPER_QUANTIZATION"], env["TEMPER_TUNE_SECONDS"]) == ("fp8", "30.0")


def test_json_is_the_result() -> None:
    done, _ = run("--json")
    assert json.loads(done.stdout) == RESULT


def test_results_that_could_not_be_kept_are_not_promised() -> None:
    done, _ = run(result=RESULT | {"file": None})
    assert "could not be kept" in done.stdout
    assert "next start" not in done.stdout


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    done, given = run("--model", str(tmp_path))
    assert (done.exit_code, given) == (2, {})
    assert "is not a checkpoint directory" in done.stderr


@pytest.mark.thorough
def test_a_machine_without_a_gpu_says_so_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """The process itself; it imports torch before it knows."""
    done = CliRunner().invoke(app, ["tune", "--json"], env={"TEMPER_DEVICE": "cpu"})
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"]["message"].endswith("this engine runs on the CPU")
    told = capfd.readouterr().err.splitlines()
    # gRPC's own notice of a fork, in a process in which other tests have used it.
    assert [line for line in told if "fork_posix.cc" not in line] == []
