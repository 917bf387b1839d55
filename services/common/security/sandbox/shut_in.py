"""Processes that shut themselves in: how they are started, watched and ended."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from services.common.errors import TemperError

_LAUNCHER = Path(__file__).with_name("launcher.py")
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
"""Directories with the libraries of an interpreter."""
_LOOK_SECONDS = 0.05
_READ_BYTES = 65536
_SAID = 300
"""Characters of a process's output that are told."""
_READY = b"ready\n"


class SandboxUnavailable(TemperError):
    """This machine does not shut programs in as the settings ask for."""


class Isolation(StrEnum):
    """What shuts a program in, beside limits and denied system calls (docs/decisions/sandbox.md)."""

    NAMESPACES = "namespaces"
    """Namespaces of its own for users, processes, network, mounts and IPC: it sees an interpreter and an empty
    directory."""
    LANDLOCK = "landlock"
    """Landlock, for where namespaces are denied: it opens an interpreter's files only, writes none, and can tell which
    other files there are."""


class NotStarted(Exception):
    """A process could not be started; the text says why."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that is over."""

    status: int
    """As subprocess has it."""
    printed: str
    stopped: str
    """The limit that it was ended at; empty: it ended by itself."""
    token: bytes = b""
    """What it wrote to the descriptor of its verdict behind "ready"."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Starts processes that shut themselves in.

    Raises:
        SandboxUnavailable: the interpreter's directory is the whole machine.
    """

    isolation: Isolation

    def __post_init__(self) -> None:
        if "/" in self._outside:
            raise self.unavailable("the interpreter's directory is the whole machine")

    @property
    def python(self) -> str:
        """The interpreter without its virtual environment."""
        return os.path.realpath(sys.executable)

    @property
    def reads(self) -> list[str]:
        """Directories that an interpreter needs."""
        return [path for path in (*_SYSTEM, *self._outside) if os.path.exists(path)]

    @property
    def _outside(self) -> list[str]:
        base = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)}
        return sorted(path for path in base if not below(path, _SYSTEM))

    def unavailable(self, reason: str) -> SandboxUnavailable:
        return SandboxUnavailable(f"TEMPER_SANDBOX={self.isolation}: {reason}")

    def run(
        self,
        job: Mapping[str, Any],
        *,
        wall_seconds: float,
        output_bytes: int,
        interrupt: Callable[[], None],
        watch: Callable[[int], str] = lambda _: "",
        channel: socket.socket | None = None,
    ) -> Ended:
        """Runs what a job says to its end or to a limit.

        Args:
            job: what the launcher reads, but for its level and its verdict.
            interrupt: called several times a second; what it raises ends the process.
            watch: called as often with the id of the session of all its processes; says which limit they are over.
            channel: is left open for the launcher.

        Raises:
            SandboxUnavailable: it cannot be shut in, and was not run.
        """
        with contextlib.ExitStack() as stack:
            verdict, verdict_end = _pipe(stack)
            whole = {**job, "verdict": verdict_end.fileno(), "level": self.isolation.value}
            try:
                file = stack.enter_context(_in_memory(json.dumps(whole)))
                ended = run_watched(
                    [self.python, "-I", "-S", "-B", "-X", "utf8", str(_LAUNCHER)],
                    wall_seconds=wall_seconds,
                    output_bytes=output_bytes,
                    interrupt=interrupt,
                    watch=watch,
                    stdin=file,
                    pass_fds=(verdict_end.fileno(), *(() if channel is None else (channel.fileno(),))),
                    env={},
                    cwd="/",
                )
            except NotStarted as error:  # as inside of a sandbox, where sessions cannot be left
                raise self.unavailable(f"its process cannot be started: {error}") from error
            verdict_end.close()
            said = verdict.read()
        if not said.startswith(_READY):
            last = last_line(ended.printed) or ended.stopped or f"its process ended with status {ended.status}"
            raise self.unavailable(f"a program cannot be shut in here: {last}")
        return replace(ended, token=said.removeprefix(_READY))


def run_watched(
    arguments: Sequence[str],
    *,
    wall_seconds: float,
    output_bytes: int,
    interrupt: Callable[[], None] = lambda: None,
    watch: Callable[[int], str] = lambda _: "",
    **options: Any,
) -> Ended:
    """Runs a process in a session of its own to its end or to a limit, and ends what it leaves behind in its group. See
    Launch.run.

    Args:
        options: of subprocess.Popen.

    Raises:
        NotStarted: there is no such program, or no process can be had.
    """
    with contextlib.ExitStack() as stack:
        output, output_end = _pipe(stack)
        try:
            process = subprocess.Popen(
                arguments, stdout=output_end, stderr=output_end, start_new_session=True, **options
            )
        except OSError as error:
            raise NotStarted(str(error)) from error
        try:
            output_end.close()
            printed, stopped = _watched(
                process, output.fileno(), wall_seconds, output_bytes, interrupt, lambda: watch(process.pid)
            )
        finally:
            _kill(process)
    return Ended(process.returncode, printed.decode(errors="replace"), stopped)


def _in_memory(text: str) -> IO[bytes]:
    """A file with a text. Raises NotStarted: none can be had."""
    try:
        file = os.fdopen(os.memfd_create("job"), "w+b")
    except OSError as error:
        raise NotStarted(str(error)) from error
    file.write(text.encode())
    file.seek(0)
    return file


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Both ends of a pipe, which are closed with the stack."""
    read, write = os.pipe()
    return stack.enter_context(os.fdopen(read, "rb", 0)), stack.enter_context(os.fdopen(write, "wb", 0))


def _watched(
    process: subprocess.Popen[bytes],
    output: int,
    wall_seconds: float,
    output_bytes: int,
    interrupt: Callable[[], None],
    watch: Callable[[], str],
) -> tuple[bytes, str]:
    """What a process printed until its end or a limit, and which limit it was."""
    printed = bytearray()
    deadline = time.monotonic() + wall_seconds
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while process.poll() is None or selector.get_map():
            if process.returncode is not None:
                _kill(process)  # what it left behind, which may hold its output
            interrupt()
            if over := watch():
                return bytes(printed), over
            if time.monotonic() > deadline:
                return bytes(printed), f"it ran for more than {wall_seconds:g} s"
            if not selector.get_map():  # it closed its output, and goes on
                time.sleep(_LOOK_SECONDS)
            elif selector.select(_LOOK_SECONDS):
                part = os.read(output, _READ_BYTES)
                printed += part
                if not part:
                    selector.unregister(output)
                if len(printed) > output_bytes:
                    return bytes(printed[:output_bytes]), f"it printed more than {output_bytes} bytes"
    return bytes(printed), ""


def below(path: str, parents: Sequence[str]) -> bool:
    """Whether a path is one of some directories or below it."""
    return any(path == parent or path.startswith(f"{parent}/") for parent in parents)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends all processes, which cannot leave their group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(text: str) -> str:
    """The last line with something in it, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_SAID] if lines else ""
