"""Programs of answers in the sandbox, from the side of the process that has them run."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any

from services.common.security.sandbox.calls import PROGRAMS, calls
from services.common.security.sandbox.shut_in import Isolation, Launch, SandboxUnavailable, last_line

_LOOK_SECONDS = 0.05
_OPEN_FILES = 64
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


class _Stopped(Exception):
    """The caller does not wait any more."""


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
        self.isolation = isolation
        self._launch = Launch(isolation)
        self._at_once = at_once
        found = calls()
        if found is None:
            raise self._launch.unavailable("this processor's system calls are not known")
        self._calls = found.without(PROGRAMS)

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
        ended = self._launch.run(
            self._job(program, token, limits),
            wall_seconds=limits.wall_seconds,
            output_bytes=limits.output_bytes,
            interrupt=interrupt,
        )
        if ended.token == token.encode():
            return Outcome(finished=True, output=ended.printed)
        return Outcome(False, ended.stopped or _ending(ended.status, ended.printed, limits), ended.printed)

    def _job(self, program: str, token: str, limits: Limits) -> dict[str, Any]:
        """What the launcher reads."""
        return {
            "program": program,
            "token": token,
            "reads": self._launch.reads,
            "limits": {**asdict(limits), "open_files": _OPEN_FILES, "with_others": False},
            "calls": self._calls,
        }


def _ending(status: int, output: str, limits: Limits) -> str:
    """Why a program did not run to its end, for people."""
    if status in (-signal.SIGXCPU, -signal.SIGKILL) or status & 0xFF in (256 - signal.SIGXCPU, 256 - signal.SIGKILL):
        return f"it took more than {limits.cpu_seconds} s of processor time"
    return last_line(output) or f"it ended itself with status {status}"
