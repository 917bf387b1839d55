"""Sections of benchmarks.suite: commands in turn, ended in time with all they started."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from benchmarks.suite import SECTIONS, Section, run

_RUN = "timeit -n 1 -r 1"
"""A module that runs code."""


def test_commands_follow_each_other_until_one_fails(tmp_path: Path) -> None:
    assert run(
        Section("good", 20, ("timeit -n 1 -r 1 'print(\"one\")'", "timeit -n 1 -r 1 'print(\"{out}\")'")), tmp_path
    )
    assert "one\n" in (tmp_path / "good.log").read_text()
    assert f"{tmp_path}\n" in (tmp_path / "good.log").read_text()
    assert not run(Section("bad", 20, ("no_such_module", f"{_RUN} 'print(2)'")), tmp_path)
    assert "No module named no_such_module" in (tmp_path / "bad.log").read_text()
    assert "2" not in (tmp_path / "bad.log").read_text().splitlines()


def test_what_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    child = "import subprocess; print(subprocess.Popen([\\'sleep\\', \\'60\\']).pid, flush=True)"
    began = time.monotonic()
    assert not run(
        Section("slow", 3, (f"timeit -n 1 -r 1 \"exec('{child}'); import time; time.sleep(60)\"",)), tmp_path
    )
    assert time.monotonic() - began < 20
    log = (tmp_path / "slow.log").read_text()
    assert "ended after 3 s" in log
    pid = int(log.splitlines()[0])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_names_are_unique() -> None:
    assert len({section.name for section in SECTIONS}) == len(SECTIONS)
