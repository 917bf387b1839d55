"""Sections of benchmarks.suite: commands in turn, ended in time with all they started."""

from __future__ import annotations

import re
import time
from importlib.util import find_spec
from pathlib import Path

import psutil

from benchmarks.suite import SECTIONS, Section, run

_RUN = "{python} -c"


def test_commands_follow_each_other_until_one_fails(tmp_path: Path) -> None:
    assert run(Section("good", 20, (f"{_RUN} 'print(1 + 1)'", f"{_RUN} 'print(repr(\"{{out}}\"))'")), tmp_path)
    assert (tmp_path / "good.log").read_text() == f"2\n'{tmp_path}'\n"
    assert not run(Section("bad", 20, ("{python} -m no_such_module", f"{_RUN} 'print(1 + 1)'")), tmp_path)
    assert "No module named no_such_module" in (tmp_path / "bad.log").read_text()
    assert "2" not in (tmp_path / "bad.log").read_text().splitlines()


def test_a_program_that_is_not_there_fails(tmp_path: Path) -> None:
    assert not run(Section("none", 20, ("no-such-program --help",)), tmp_path)
    assert "no-such-program" in (tmp_path / "none.log").read_text()


def test_what_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    code = 'import subprocess, time; print(subprocess.Popen(("sleep", "60")).pid, flush=True); time.sleep(60)'
    began = time.monotonic()
    assert not run(Section("slow", 3, (f"{_RUN} '{code}'",)), tmp_path)
    assert time.monotonic() - began < 20
    pid, last = (tmp_path / "slow.log").read_text().strip().split("\n\n")
    assert last.startswith("ended after 3 s")
    assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE


def test_names_are_unique() -> None:
    assert len({section.name for section in SECTIONS}) == len(SECTIONS)


def test_every_command_runs_a_module_that_is_there() -> None:
    modules = {
        match for section in SECTIONS for command in section.commands for match in re.findall(r"-m (\S+)", command)
    }
    assert len(modules) > 8
    assert [name for name in sorted(modules - {"cuda", "'not"}) if find_spec(name) is None] == []
