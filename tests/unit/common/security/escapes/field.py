"""The field of the attempts: files, processes and sockets to get at, and a workspace. `python -m …field ISOLATION`
makes all attempts inside and outside of the sandbox, and prints what came of it as JSON."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.security.sandbox.commands import CommandLimits, CommandOutcome, CommandSandbox
from services.common.security.sandbox.shut_in import Isolation
from tests.unit.common.security.escapes import attempts

KEY = "sk-secret-of-this-machine"
# Not in /tmp: of that a command has one of its own, where it may write.
_FIELDS = "/var/tmp"
_ALL = sorted({attempt.outside for attempt in attempts.ATTEMPTS})
LIMITS = CommandLimits(wall_seconds=30, memory_bytes=2**28, disk_bytes=2**25, temporary_bytes=2**20, output_bytes=2**16)

HOGS: dict[str, tuple[str, CommandLimits, str]] = {
    "forks without end": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        replace(LIMITS, wall_seconds=1.5),
        "more than",
    ),
    "takes memory": ("x = []\nwhile True: x.append(bytearray(2**24))", LIMITS, "MemoryError"),
    "takes memory in several processes": (
        "import os, time\nfor _ in range(9):\n    if not os.fork():\n        x = bytearray(b'x') * (96 * 2**20)\n"
        "        time.sleep(9)\n        os._exit(0)\ntime.sleep(9)",
        LIMITS,
        "bytes of memory",
    ),
    "takes memory that no process has of its own": (
        "import mmap, os, time\nfor _ in range(9):\n    if not os.fork():\n"
        "        mmap.mmap(-1, 96 * 2**20).write(bytes(96 * 2**20))\n        time.sleep(9)\n"
        "        os._exit(0)\ntime.sleep(9)",
        LIMITS,
        "bytes of memory",
    ),
    "fills the disk with one file": (
        "f = open('f', 'wb')\nwhile True: f.write(bytes(2**20)); f.flush()",
        LIMITS,
        "File too large",
    ),
    "fills the disk with many files": (
        "import os, time\nfor n in range(64):\n    with open(f'f{n}', 'wb') as f: f.write(os.urandom(2**20))\n"
        "    os.sync(); time.sleep(0.02)",
        LIMITS,
        "bytes to the workspace",
    ),
    "prints without end": ("while True: print('x' * 1000)", LIMITS, "printed more than"),
    "waits without end": ("import time\ntime.sleep(99)", replace(LIMITS, wall_seconds=0.3), "ran for more than"),
    "computes without end": ("while True: pass", replace(LIMITS, cpu_seconds=1), "processor time"),
}
"""Program, its limits, and what it ends with."""


@contextlib.contextmanager
def field() -> Iterator[dict[str, Any]]:
    """What there is to get at."""
    with contextlib.ExitStack() as stack:
        base = Path(os.path.realpath(stack.enter_context(tempfile.TemporaryDirectory(dir=_FIELDS))))
        outside, workspace = base / "outside", base / "workspace"
        for directory in (outside, workspace):
            directory.mkdir()
        (outside / "secret").write_text(KEY)
        (outside / "doomed").touch()
        (outside / "long").write_text("long")
        shutil.copy("/bin/true", outside / "program")
        shutil.copy(attempts.__file__, workspace / "attempts.py")
        _, shared = tempfile.mkstemp(dir="/dev/shm")
        stack.callback(os.unlink, shared)
        value = ctypes.c_long(1)
        victim = os.fork()
        if not victim:
            os.chdir(outside)
            signal.pause()
            signal.pause()
            os._exit(0)
        stack.callback(os.waitpid, victim, 0)
        stack.callback(os.kill, victim, signal.SIGKILL)
        abstract = f"temper-{os.getpid()}"
        listening: list[tuple[int, int, Any]] = [
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            (socket.AF_UNIX, socket.SOCK_STREAM, str(outside / "socket")),
            (socket.AF_UNIX, socket.SOCK_STREAM, str(workspace / "socket")),
            (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{abstract}"),
            (socket.AF_UNIX, socket.SOCK_DGRAM, f"\0{abstract}-datagrams"),
        ]
        sockets = []
        for family, kind, address in listening:
            one = stack.enter_context(socket.socket(family, kind))
            one.bind(address)
            if kind == socket.SOCK_STREAM:
                one.listen()
            sockets.append(one)
        descriptor = os.open(outside / "secret", os.O_RDONLY)
        os.set_inheritable(descriptor, True)
        stack.callback(os.close, descriptor)
        main, other = os.openpty()
        stack.callback(os.close, main)
        stack.callback(os.close, other)
        yield {
            "key": KEY,
            "base": str(base),
            "outside": str(outside),
            "secret": str(outside / "secret"),
            "workspace": str(workspace),
            "shared": shared,
            "victim": victim,
            "address": ctypes.addressof(value),
            "parent": os.getpid(),
            "home": os.path.expanduser("~"),
            "tcp": sockets[0].getsockname()[1],
            "udp": sockets[1].getsockname()[1],
            "abstract": abstract,
            "descriptor": descriptor,
            "terminal": os.ttyname(other),
        }


def tree(place: dict[str, Any]) -> list[tuple[Any, ...]]:
    """All that is outside of the workspace."""
    found = []
    for path in sorted(Path(place["base"]).rglob("*")):
        if path != Path(place["workspace"]) and Path(place["workspace"]) not in path.parents:
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            found.append((str(path), status.st_mode, status.st_mtime_ns, hash(content)))
    return [*found, os.stat(place["base"]).st_mode]  # type: ignore[list-item]


def said(lines: str) -> dict[str, str]:
    return dict(json.loads(line) for line in lines.splitlines() if line.startswith('["'))


def has_all_rights() -> bool:
    """A root with all capabilities on a machine of its own."""
    status = Path("/proc/self/status").read_text()
    rights = next(line for line in status.splitlines() if line.startswith("CapEff")).split()[1]
    return os.geteuid() == 0 and int(rights, 16) & (1 << 21 | 1 << 19 | 1 << 2) == (1 << 21 | 1 << 19 | 1 << 2)


def main() -> None:
    isolation = Isolation(sys.argv[1])
    with field() as place:
        sandbox = CommandSandbox(isolation, Path(place["workspace"]))
        sandbox.check()
        before = tree(place)
        argument = json.dumps({**place, "tries": _ALL})
        inside = sandbox.run([sandbox.python, "-I", "-S", "attempts.py", argument], LIMITS)
        hogs: dict[str, CommandOutcome] = {}
        for name, (program, limits, _) in HOGS.items():
            hogs[name] = sandbox.run([sandbox.python, "-I", "-S", "-c", program], limits)
            for file in Path(place["workspace"]).glob("f*"):
                file.unlink()
        left = sandbox.run(["sh", "-c", "sleep 98 & sleep 97 & exit 0"], LIMITS)
        changed = tree(place) != before
        living = [
            name
            for name in os.listdir("/proc")
            if name.isdecimal() and _arguments(name) in (b"sleep\x0098\x00", b"sleep\x0097\x00")
        ]
        shutil.rmtree(place["workspace"])
        os.mkdir(place["workspace"])
        shutil.copy(attempts.__file__, Path(place["workspace"]) / "attempts.py")
        address = socket.socket(socket.AF_UNIX)
        address.bind(str(Path(place["workspace"]) / "socket"))
        address.listen()
        tries = ["works", *(["root"] if has_all_rights() else [])]
        outside = subprocess.run(
            [sys.executable, "-I", "-S", "attempts.py", json.dumps({**place, "tries": tries})],
            cwd=place["workspace"],
            capture_output=True,
            text=True,
            pass_fds=(place["descriptor"],),
            env={"KEY": KEY},
            timeout=60,
            check=False,
        )
        address.close()
    report = {
        "inside": said(inside.output),
        "inside_end": [inside.status, inside.stopped, inside.output[-500:]],
        "outside": said(outside.stdout),
        "outside_end": outside.stderr[-500:],
        "hogs": {name: [one.status, one.stopped, one.output[-300:]] for name, one in hogs.items()},
        "changed": changed,
        "leaked": KEY in inside.output,
        "left": [left.status, living],
        "tries": tries,
    }
    sys.stdout.write(json.dumps(report))


def _arguments(pid: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


if __name__ == "__main__":
    main()
