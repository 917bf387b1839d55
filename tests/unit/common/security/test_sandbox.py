"""The sandbox against programs that want out, want more, or want to look as if they had passed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.security.sandbox.commands import available
from services.common.security.sandbox.sandbox import Limits, Outcome, Sandbox
from services.common.security.sandbox.shut_in import Isolation
from tests.missing import any_sandbox, sandbox_level

LIMITS = Limits(cpu_seconds=1, wall_seconds=3.0, memory_bytes=256 * 2**20, file_bytes=2**20, output_bytes=2**16)
SECRET = "sk-secret-of-the-pod"
REFUSALS = ("not permitted", "Permission denied", "No such", "not allowed", "Read-only", "Invalid argument")
ESCAPES = {
    "reads the environment of the pod": "print(open('/proc/{pid}/environ').read())",
    "reads the environment of the first process": "print(open('/proc/1/environ').read())",
    "reads its own environment by the kernel": "print(open('/proc/self/environ').read())",
    "reads a file of the pod": "print(open({file!r}).read())",
    "reads it by a link": "import os\nos.symlink({file!r}, 'link')\nprint(open('link').read())",
    "reads the token of the cluster": "print(open('/var/run/secrets/kubernetes.io/serviceaccount/token').read())",
    "lists where it is run from": "import os\nprint(os.listdir({directory!r}))",
    "writes a file of the pod": "open({file!r}, 'w').write('mine')",
    "changes the rights of a file": "import os\nos.chmod({file!r}, 0)",
    "shortens a file": "import os\nos.truncate({file!r}, 0)",
    "writes into the interpreter": "import os\nopen(os.__file__, 'a').write('x')",
    "opens a device": "open('/dev/vda', 'rb').read(1)",
    "connects": "import socket\nsocket.create_connection(('127.0.0.1', 1))",
    "sends datagrams": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "opens a socket of this machine": "import socket\nsocket.socket(socket.AF_UNIX)",
    "forks without end": "import os\nwhile True: os.fork()",
    "runs a shell": "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo hello'])",
    "runs a program": "import subprocess\nsubprocess.run(['/bin/true'])",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "kills the pod": "import os\nos.kill({pid}, 9)",
    "kills everybody": "import os\nos.kill(-1, 9)",
    "leaves its group": "import os\nos.setsid()",
    "limits the pod": "import resource\nresource.prlimit({pid}, resource.RLIMIT_AS, (2**20, 2**20))",
    "lifts its limits": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (9, 9))",
    "becomes root": "import os\nos.setuid(1)\nos.setuid(0)",
    "traces": "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "if libc.ptrace(16, {pid}, 0, 0) < 0: raise PermissionError(1, os.strerror(1))",
    "takes namespaces": "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "if libc.unshare(0x10000000) < 0: raise PermissionError(1, os.strerror(1))",
}
FAKES = {
    "exits with 0": "import sys\nsys.exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "exits from a thread": "import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()\n"
    "import time\ntime.sleep(5)",
    "says that it is ready": "import os\nprint('ready')\nos._exit(0)",
    "closes everything": "import os\nos.closerange(0, 100)",
    "asks for input": "print(input())",
    "is none": "def f(:",
}


@pytest.fixture(scope="module", params=Isolation)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    found = Sandbox(request.param)
    with sandbox_level():
        found.check()
    return found


def test_a_sandbox_works_here(tmp_path: Path) -> None:
    with any_sandbox():
        available(tmp_path.resolve())


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TEMPER_SECRET", SECRET)
    found = tmp_path / "secret"
    found.write_text(SECRET)
    return found


def failed(outcome: Outcome, *reasons: str) -> None:
    assert not outcome.finished, outcome
    assert any(reason in outcome.reason for reason in reasons), outcome


def test_a_program_runs_to_its_end_with_the_standard_library_and_nothing_else(sandbox: Sandbox) -> None:
    program = "\n".join(
        [
            "import asyncio, collections, dataclasses, decimal, hashlib, itertools, math, os, random, re, sys, typing",
            "import threading",
            "thread = threading.Thread(target=print, args=('beside',))",
            "thread.start(); thread.join()",
            "print(dict(os.environ) | {'LC_CTYPE': ''}, sys.argv, __name__, random.random() < 1, sys.stdin.read())",
            "try: import torch",
            "except ImportError: print('no torch')",
        ]
    )
    outcome = sandbox.run(program, LIMITS)
    assert outcome.finished, outcome
    assert outcome.output.split("\n")[:2] == ["beside", "{'LC_CTYPE': ''} ['answer'] __main__ True "]
    assert outcome.output.endswith("no torch\n")


@pytest.mark.parametrize("escape", ESCAPES)
def test_nobody_gets_out(sandbox: Sandbox, file: Path, escape: str) -> None:
    program = ESCAPES[escape].format(pid=os.getpid(), file=str(file), directory=str(Path.cwd()))
    outcome = sandbox.run(program, LIMITS)
    failed(outcome, *REFUSALS)
    assert SECRET not in outcome.output
    assert (file.read_text(), file.stat().st_mode & 0o600) == (SECRET, 0o600)


@pytest.mark.sampled
@pytest.mark.parametrize("fake", FAKES)
def test_nobody_passes_by_ending(sandbox: Sandbox, fake: str) -> None:
    assert not sandbox.run(f"{FAKES[fake]}\nraise AssertionError('wrong')", LIMITS).finished


def test_limits_hold(sandbox: Sandbox) -> None:
    # Programs run behind everything else (nice 19): on a busy machine a second of processor time takes many of a clock.
    patient = replace(LIMITS, wall_seconds=60.0)
    failed(sandbox.run("while True: pass", patient), "1 s of processor time")
    failed(sandbox.run("import time\ntime.sleep(60)", Limits(wall_seconds=0.5)), "more than 0.5 s")
    failed(sandbox.run("x = [0] * 10**9", LIMITS), "MemoryError")
    failed(sandbox.run("while True: print('x' * 1000)", LIMITS), "printed more than 65536 bytes")
    threads = "import threading, time\nfor _ in range(100): threading.Thread(target=time.sleep, args=(9,)).start()"
    failed(sandbox.run(threads, LIMITS), "can't start new thread", "Resource temporarily", "MemoryError", "more than")
    written = sandbox.run("open('f', 'wb').write(bytes(2**21))", LIMITS)
    failed(written, "File too large", "No space left", "Permission denied")
    several = "for n in range(9): open(f'f{n}', 'wb').write(bytes(2**18))"
    failed(sandbox.run(several, LIMITS), "No space left", "Permission denied")


def test_nothing_is_left_behind(sandbox: Sandbox) -> None:
    class Enough(Exception):
        pass

    began = time.monotonic()

    def interrupt() -> None:
        if time.monotonic() - began > 0.3:
            raise Enough

    with pytest.raises(Enough):
        sandbox.run_all(["import time\ntime.sleep(120)"] * 3, replace(LIMITS, wall_seconds=120.0), interrupt)
    assert time.monotonic() - began < 60
    children = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children")
    assert not [pid for pid in children.read_text().split() if b"launcher" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    descriptors = len(os.listdir("/proc/self/fd"))
    ends = sandbox.run_all(["pass", "raise ValueError('no')", "print('é')"], LIMITS, lambda: None)
    assert [(one.finished, one.reason, one.output[-2:]) for one in ends] == [
        (True, "", ""),
        (False, "ValueError: no", "o\n"),
        (True, "", "é\n"),
    ]
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_who_may_not_make_namespaces_is_refused_or_asks_for_those_of_users() -> None:
    """A root without rights over this machine makes namespaces as a user does; without those nothing is run."""
    if os.geteuid() != 0:
        pytest.skip("rights are given up by root")
    run = "from services.common.security.sandbox.sandbox import *; Sandbox(Isolation.NAMESPACES).check()"
    without = ["setpriv", "--bounding-set", "-sys_admin", sys.executable, "-c", run]
    assert subprocess.run(without, capture_output=True, timeout=30, check=False).returncode == 0
    denied = f"import ctypes; ctypes.CDLL(None).unshare(0x10000000); {run}"  # within one, no id is its own
    without[-1] = denied
    done = subprocess.run(without, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "choose landlock, which needs no user namespaces, or off" in done.stderr


def test_limits_are_above_nothing() -> None:
    with pytest.raises(ValueError, match="cpu_seconds of a sandbox is 0"):
        Limits(cpu_seconds=0)
