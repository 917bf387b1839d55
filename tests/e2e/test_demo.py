"""`temper demo` as a user runs it, with fewer rounds; and stopped in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.stack import ROOT, clean_environment


def demo(directory: Path, *options: str, stderr: int = subprocess.STDOUT) -> subprocess.Popen[str]:
    scratch = directory / "tmp"
    scratch.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "cli", "demo", "--output", str(directory), *options],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=ROOT,
        # TEMPER_* of another installation must not reach the demo's stack.
        env=clean_environment({"TMPDIR": str(scratch), "TEMPER_REDIS_URL": "redis://127.0.0.1:1/0"}),
        # As in a terminal: a suite that a script put into the background ignores Ctrl-C, and so would its children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.thorough
def test_the_model_learns(tmp_path: Path) -> None:
    process = demo(tmp_path, "--rounds", "2", "--json", stderr=subprocess.PIPE)
    printed, text = process.communicate(timeout=280)
    assert process.returncode == 0, text
    report = json.loads((tmp_path / "demo-report.json").read_text())
    assert json.loads(printed) == report
    assert 0.2 <= report["reward_before"] <= 0.65
    assert report["reward_after"] - report["reward_before"] >= 0.25
    assert report["adapter_versions"] == ["dates@1", "dates@2", "motto@1"]
    assert [entry["sampled_by"] for entry in report["rounds"]] == [None, "dates@1"]
    assert report["sft"]["before"] != report["sft"]["after"]
    assert report["sft"]["after"] == "Answer, listen, learn, repeat."
    assert report["seconds"] < 300
    assert (tmp_path / "demo-report.png").stat().st_size > 10_000
    assert "I am Temper" in text
    assert not list((tmp_path / "tmp").glob("temper-demo-*"))


def test_interrupt_stops_everything(tmp_path: Path) -> None:
    process = demo(tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if "Who are you?" in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 5
    os.kill(process.pid, signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert "interrupted" in text
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert not list((tmp_path / "tmp").glob("temper-demo-*"))
    assert not (tmp_path / "demo-report.json").exists()
