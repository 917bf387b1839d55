"""Commands in the sandbox against attempts to get out, to get more, and to stay: none succeeds, and outside of the
sandbox they do."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.security.sandbox.commands import CommandLimits, CommandSandbox, available
from services.common.security.sandbox.shut_in import Isolation, SandboxUnavailable
from tests.missing import any_sandbox, sandbox_level
from tests.stack import ROOT
from tests.unit.common.security.escapes.attempts import ATTEMPTS
from tests.unit.common.security.escapes.field import HOGS, KEY

_NOBODY = 65534
_UNAVAILABLE = "TEMPER_SANDBOX="


def _run(isolation: Isolation) -> subprocess.CompletedProcess[str]:
    """All attempts, made in a process of its own; with Landlock by a user who is not root, whom the kernel exempts from
    the limit of processes."""
    python, user = sys.executable, None
    if isolation == Isolation.LANDLOCK and os.geteuid() == 0:
        user = _NOBODY
        for python in (sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin") or ""):
            tried = [python, "-c", "import sys, services.common.errors; sys.exit(sys.version_info < (3, 11))"]
            try:
                if subprocess.run(tried, user=user, group=user, extra_groups=[], cwd=ROOT, check=False).returncode == 0:
                    break
            except OSError:
                continue
        else:
            pytest.skip("nobody has no interpreter of Python 3.11 or newer here that it may run, or not this directory")
    return subprocess.run(
        [python, "-B", "-m", "tests.unit.common.security.escapes.field", isolation],
        cwd=ROOT,
        env={"KEY": KEY, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        check=False,
    )


@pytest.fixture(scope="module", params=Isolation)
def report(request: pytest.FixtureRequest) -> dict[str, Any]:
    done = _run(request.param)
    if _UNAVAILABLE in done.stderr and "a command is not shut in" not in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def test_no_attempt_succeeds(report: dict[str, Any]) -> None:
    assert set(report["inside"]) == {attempt.name for attempt in ATTEMPTS}, report["inside_end"]
    assert [name for name, said in report["inside"].items() if said == "worked"] == []
    assert not report["changed"]
    assert not report["leaked"]


def test_the_same_attempts_work_without_a_sandbox(report: dict[str, Any]) -> None:
    tried = {attempt.name for attempt in ATTEMPTS if attempt.outside in report["tries"]}
    assert len(tried) >= 40
    assert set(report["outside"]) == tried, report["outside_end"]
    assert {name: said for name, said in report["outside"].items() if said != "worked"} == {}


@pytest.mark.parametrize("hog", HOGS)
def test_no_command_takes_more_than_its_limits(report: dict[str, Any], hog: str) -> None:
    status, stopped, output = report["hogs"][hog]
    assert status != 0
    assert HOGS[hog][2] in stopped + output


def test_nothing_goes_on_behind_a_command(report: dict[str, Any]) -> None:
    assert report["left"] == [0, []]


def test_memory_that_processes_share_counts_once(tmp_path: Path) -> None:
    with any_sandbox():
        sandbox = available(tmp_path)
    program = (
        "import mmap, os, time\nshared = mmap.mmap(-1, 96 * 2**20)\nfor _ in range(6):\n    if not os.fork():\n"
        "        shared[:] = bytes(96 * 2**20)\n        time.sleep(1)\n        os._exit(0)\n"
        "for _ in range(6): os.wait()"
    )
    outcome = sandbox.run([sandbox.python, "-I", "-S", "-c", program], CommandLimits(memory_bytes=2**29))
    assert (outcome.status, outcome.stopped) == (0, "")


_KILLED = """
import sys
from pathlib import Path
from services.common.security.sandbox.commands import CommandLimits, CommandSandbox
from services.common.security.sandbox.shut_in import Isolation
command = "sleep 96 & sleep 95 & touch begun; wait"
CommandSandbox(Isolation.NAMESPACES, Path(sys.argv[1])).run(["/bin/sh", "-c", command], CommandLimits())
"""


def test_no_command_outlives_the_program_that_watches_it(tmp_path: Path) -> None:
    with sandbox_level():
        CommandSandbox(Isolation.NAMESPACES, tmp_path).check()
    with subprocess.Popen([sys.executable, "-c", _KILLED, str(tmp_path)], cwd=ROOT) as watcher:
        eventually(lambda: (tmp_path / "begun").exists())
        assert sleeping() == {b"sleep\x0096\x00", b"sleep\x0095\x00"}
        watcher.kill()
    eventually(lambda: not sleeping())


def sleeping() -> set[bytes]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.add((process / "cmdline").read_bytes())
    return found & {b"sleep\x0096\x00", b"sleep\x0095\x00"}


def eventually(so: Callable[[], bool]) -> None:
    for _ in range(300):
        if so():
            return
        time.sleep(0.1)
    raise AssertionError


def test_there_are_no_commands_without_a_sandbox(tmp_path: Path) -> None:
    """Within a sandbox there is none: neither namespaces nor a session of its own can be had."""
    with any_sandbox():
        sandbox = available(tmp_path, reads=[str(ROOT)])
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\n"
        "from services.common.security.sandbox.commands import available\n"
        f"inner = Path({str(tmp_path)!r}, 'inner'); inner.mkdir(exist_ok=True)\navailable(inner)"
    )
    outcome = sandbox.run([sandbox.python, "-I", "-B", "-c", program], CommandLimits())
    assert outcome.status == 1
    assert "no sandbox works here: namespaces: its process cannot be started" in outcome.output
    assert "; landlock: its process cannot be started" in outcome.output


def test_a_command_keeps_to_its_workspace_and_its_limits_have_bounds(tmp_path: Path) -> None:
    for place in ("/", "/usr", "/etc/ssh", os.path.realpath(sys.base_prefix), os.path.dirname(sys.base_prefix)):
        with pytest.raises(SandboxUnavailable, match=r"choose a project's directory|not a directory by its real path"):
            CommandSandbox(Isolation.NAMESPACES, Path(place))
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(SandboxUnavailable, match="by its real path"):
        CommandSandbox(Isolation.NAMESPACES, tmp_path / "link")
    with pytest.raises(ValueError, match="processes of a command is 10: must be at least 302"):
        CommandLimits(processes=10)
    with pytest.raises(ValueError, match="wall_seconds of a command is 0"):
        CommandLimits(wall_seconds=0)
