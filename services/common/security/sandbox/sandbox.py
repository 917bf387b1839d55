"""Programs in the sandbox, from the side of the process that has them run."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from services.common.errors import TemperError
from services.common.security.sandbox.calls import calls

_LAUNCHER = Path(__file__).with_name("launcher.py")
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
"""Directories with the libraries of an interpreter."""
_LOOK_SECONDS = 0.05
_READ_BYTES = 65536
_SAID = 300
"""Characters of a program's output that are told."""
_READY = b"ready\n"
_TRIES_OUT = """
import os, socket
for name in ("/proc/1/environ", "/proc/self/environ", "/etc/passwd", "/etc/shadow"):
    try:
        open(name).read()
    except OSError:
        continue
    raise SystemExit(f"it can read {name}")
for escape in (os.fork, socket.socket, lambda: os.kill(os.getppid() or 1, 0)):
    try:
        escape()
    except OSError:
        continue
    raise SystemExit(f"it can {escape}")
"""


class SandboxUnavailable(TemperError):
    """This machine does not shut programs in as the settings ask for."""


class _Stopped(Exception):
    """The caller does not wait any more."""


class Isolation(StrEnum):
    """What shuts a program in, beside limits and denied system calls (docs/decisions/sandbox.md)."""

    NAMESPACES = "namespaces"
    """Namespaces of its own for users, processes, network, mounts and IPC: it sees an interpreter and an empty
    directory."""
    LANDLOCK = "landlock"
    """Landlock, for where namespaces are denied: it opens an interpreter's files only, writes none, and can tell which
    other files there are."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program. Raises ValueError: one is not positive."""

    cpu_seconds: int = 10
    wall_seconds: float = 40.0
    memory_bytes: int = 512 * 2**20
    """Address space."""
    file_bytes: int = 16 * 2**20
    """Of all files that it writes, which go with it."""
    output_bytes: int = 2**20
    threads: int = 32

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"{name} of a sandbox is {value}: must be above 0")


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a program."""

    finished: bool
    """Whether it ran to its last line; one that ends itself before, with whatever status, did not."""
    reason: str = ""
    """Why it did not."""
    output: str = ""
    """Beginning of what it printed."""


class Sandbox:
    """Runs Python programs, each in a process that is shut in and ends with the program. They have the standard
    library, no environment and nothing to read on standard input. Thread-safe.

    Args:
        at_once: programs of one call of ``run_all`` that run at a time.

    Raises:
        SandboxUnavailable: the processor's architecture is not known.
    """

    def __init__(self, isolation: Isolation, at_once: int = 2) -> None:
        found = calls()
        if found is None:
            raise SandboxUnavailable(f"TEMPER_SANDBOX={isolation}: this processor's system calls are not known")
        self.isolation = isolation
        self._at_once = at_once
        self._calls = {**asdict(found), "denied": sorted(found.denied.values())}
        self._python = os.path.realpath(sys.executable)
        base = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)}
        outside = sorted(path for path in base if not _below(path, _SYSTEM))
        if any(path == "/" for path in outside):
            raise SandboxUnavailable(f"TEMPER_SANDBOX={isolation}: the interpreter's directory is the whole machine")
        self._reads = [path for path in (*_SYSTEM, *outside) if os.path.exists(path)]

    def check(self) -> None:
        """Tries whether programs are shut in. Raises SandboxUnavailable, with the reason and the way out."""
        try:
            outcome = self.run(_TRIES_OUT, Limits())
        except SandboxUnavailable as error:
            other = {Isolation.NAMESPACES: "landlock, which needs no user namespaces, or ", Isolation.LANDLOCK: ""}
            raise SandboxUnavailable(f"{error.message}: choose {other[self.isolation]}off") from error
        if not outcome.finished:
            raise SandboxUnavailable(f"TEMPER_SANDBOX={self.isolation}: a program is not shut in: {outcome.reason}")

    def run_all(self, programs: Sequence[str], limits: Limits, interrupt: Callable[[], None]) -> list[Outcome]:
        """Runs programs, and returns their ends in the order of the programs. See ``run``."""
        over = threading.Event()

        def stop() -> None:
            if over.is_set():
                raise _Stopped

        with ThreadPoolExecutor(self._at_once, thread_name_prefix="sandbox") as threads:
            waiting = [threads.submit(self.run, program, limits, stop) for program in programs]
            try:
                while wait(waiting, _LOOK_SECONDS, FIRST_EXCEPTION).not_done:
                    interrupt()
                    if any(one.done() and one.exception() for one in waiting):
                        break
                return [one.result() for one in waiting]
            finally:
                over.set()
                for one in waiting:
                    one.cancel()

    def run(self, program: str, limits: Limits, interrupt: Callable[[], None] = lambda: None) -> Outcome:
        """Runs a program to its end or to a limit.

        Args:
            interrupt: called several times a second; what it raises ends the program.

        Raises:
            SandboxUnavailable: it cannot be shut in, and was not run.
        """
        token = secrets.token_hex(16)
        with contextlib.ExitStack() as stack:
            verdict, verdict_end = _pipe(stack)
            output, output_end = _pipe(stack)
            job = stack.enter_context(os.fdopen(os.memfd_create("job"), "w+b"))
            job.write(json.dumps(self._job(program, token, verdict_end.fileno(), limits)).encode())
            job.seek(0)
            process = subprocess.Popen(
                [self._python, "-I", "-S", "-B", "-X", "utf8", str(_LAUNCHER)],
                stdin=job,
                stdout=output_end,
                stderr=output_end,
                pass_fds=(verdict_end.fileno(),),
                env={},
                cwd="/",
                start_new_session=True,
            )
            try:
                verdict_end.close()
                output_end.close()
                printed, ended = _watched(process, output.fileno(), limits, interrupt)
            finally:
                _kill(process)
            said = verdict.read()
        text = printed.decode(errors="replace")
        if not said.startswith(_READY):
            last = _last_line(text) or f"its process ended with status {process.returncode}"
            raise SandboxUnavailable(f"TEMPER_SANDBOX={self.isolation}: a program cannot be shut in here: {last}")
        if said == _READY + token.encode():
            return Outcome(finished=True, output=text)
        return Outcome(False, ended or _ending(process.returncode, text, limits), text)

    def _job(self, program: str, token: str, verdict: int, limits: Limits) -> dict[str, Any]:
        """What the launcher reads."""
        return {
            "program": program,
            "token": token,
            "verdict": verdict,
            "level": self.isolation.value,
            "reads": self._reads,
            "limits": asdict(limits),
            "calls": self._calls,
        }


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Both ends of a pipe, which are closed with the stack."""
    read, write = os.pipe()
    return stack.enter_context(os.fdopen(read, "rb", 0)), stack.enter_context(os.fdopen(write, "wb", 0))


def _watched(
    process: subprocess.Popen[bytes], output: int, limits: Limits, interrupt: Callable[[], None]
) -> tuple[bytes, str]:
    """What a process printed until its end or a limit, and which limit it was."""
    printed = bytearray()
    deadline = time.monotonic() + limits.wall_seconds
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while process.poll() is None or selector.get_map():
            interrupt()
            if time.monotonic() > deadline:
                return bytes(printed), f"it ran for more than {limits.wall_seconds:g} s"
            if not selector.get_map():  # it closed its output, and goes on
                time.sleep(_LOOK_SECONDS)
            elif selector.select(_LOOK_SECONDS):
                part = os.read(output, _READ_BYTES)
                printed += part
                if not part:
                    selector.unregister(output)
                if len(printed) > limits.output_bytes:
                    return bytes(printed[: limits.output_bytes]), f"it printed more than {limits.output_bytes} bytes"
    return bytes(printed), ""


def _below(path: str, parents: tuple[str, ...]) -> bool:
    return any(path == parent or path.startswith(f"{parent}/") for parent in parents)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends all processes of a program, which cannot leave their group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ending(status: int, output: str, limits: Limits) -> str:
    """Why a program did not run to its end, for people."""
    if status in (-signal.SIGXCPU, -signal.SIGKILL) or status & 0xFF in (256 - signal.SIGXCPU, 256 - signal.SIGKILL):
        return f"it took more than {limits.cpu_seconds} s of processor time"
    return _last_line(output) or f"it ended itself with status {status}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_SAID] if lines else ""
