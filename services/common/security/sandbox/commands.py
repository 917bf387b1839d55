"""Commands in the sandbox: programs that are made of processes, with a workspace that they change."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from services.common.security.sandbox.allowed_hosts import AllowedHosts
from services.common.security.sandbox.calls import calls, of_commands
from services.common.security.sandbox.shut_in import Isolation, Launch, SandboxUnavailable, below, last_line

_LANDLOCK_CREATE = 444
_LANDLOCK_TRUNCATES, _LANDLOCK_SCOPES_SIGNALS = 3, 6
"""Versions of Landlock."""
_PROXY_PORT = 3128
_OPEN_FILES = 256
_WATCH_SECONDS = 0.1
_MOST_NEW_FILES = 100_000
_LEAST_PROCESSES = 302
_ANYBODYS = 8
_SYSTEM_READS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/ssl/certs")
"""What programs of a distribution look for outside of /usr."""
_NEVER = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/dev", "/proc", "/sys", "/boot", "/run", "/var/run")
"""Directories that a workspace is not in."""
_TRIES_OUT = """
import _thread, os, socket, sys, time
most, outside, parent = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def readable(path): return lambda: open(path, "rb").read(1)
try: open(outside, "w").close()
except OSError: pass
for name, escape in {
    "read the environment of its parent": readable(f"/proc/{parent}/environ"),
    "read /etc/passwd": readable("/etc/passwd"),
    "open a socket of the machine": lambda: socket.socket(socket.AF_UNIX),
    "leave its session": os.setsid,
    "signal its parent": lambda: os.kill(parent, 0),
}.items():
    try:
        escape()
    except OSError:
        continue
    raise SystemExit(f"it can {name}")
if set(os.environ) - {"PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE"}:
    raise SystemExit("it has an environment")
_thread.stack_size(65536)
for _ in range(most + 1):  # threads count as processes do, and are made sooner
    try:
        _thread.start_new_thread(time.sleep, (60,))
    except RuntimeError:
        break
else:
    raise SystemExit(f"it has more than {most} processes")
os._exit(0)
"""


@dataclass(frozen=True, slots=True)
class CommandLimits:
    """Limits of one command. Raises ValueError: one is out of its range."""

    wall_seconds: float = 60.0
    cpu_seconds: int = 60
    """Of each of its processes."""
    memory_bytes: int = 2 * 2**30
    """Address space of each of its processes, and memory of all of them."""
    processes: int = 400
    """Threads of all of its processes. The kernel takes no number below 302 where the user is root."""
    disk_bytes: int = 2**30
    """Of what it writes to the workspace, and the size of a file."""
    temporary_bytes: int = 64 * 2**20
    """Of /tmp and /dev/shm, which are in memory and go with it."""
    output_bytes: int = 2**20

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = _LEAST_PROCESSES if name == "processes" else 1
            if value < (least if isinstance(value, int) else 0.01):
                raise ValueError(f"{name} of a command is {value}: must be at least {least}")


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """End of a command."""

    status: int
    """Its exit status; 128 and a signal's number, if one ended it."""
    output: str
    """Beginning of what it printed, both streams in one."""
    stopped: str = ""
    """Limit that it was ended at; empty: it ended by itself."""


@dataclass(frozen=True, slots=True)
class CommandSandbox:
    """Runs commands, each with all its processes in a sandbox of its own. They write to the workspace and nowhere else,
    read it and what an interpreter needs, and have no environment, no standard input and no network but ``hosts``.

    Raises:
        SandboxUnavailable: this machine has not what it takes, or the workspace is none that can be shut in.
    """

    isolation: Isolation
    workspace: Path
    """Absolute, without links."""
    reads: tuple[str, ...] = ()
    """More directories that commands may read."""
    hosts: AllowedHosts = field(default_factory=AllowedHosts)
    _launch: Launch = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_launch", Launch(self.isolation))
        where = str(self.workspace)
        if where != os.path.realpath(where) or not os.path.isdir(where):
            raise self._launch.unavailable(f"the workspace {where} is not a directory by its real path")
        if where == "/" or below(where, _NEVER) or any(below(path, [where]) for path in self._launch.reads):
            raise self._launch.unavailable(
                f"the workspace {where} is part of the system or contains the interpreter: choose a project's directory"
            )
        if calls() is None:
            raise self._launch.unavailable("this processor's system calls are not known")
        if self.isolation == Isolation.LANDLOCK:
            if _landlock_version() < _LANDLOCK_TRUNCATES:
                raise self._launch.unavailable("the kernel's Landlock does not see files being shortened (Linux 6.2)")
            if self.hosts:
                raise self._launch.unavailable("hosts can be allowed with namespaces only")

    @property
    def python(self) -> str:
        """An interpreter that commands can start."""
        return self._launch.python

    def check(self) -> None:
        """Tries whether commands are shut in. Raises SandboxUnavailable, with the reason."""
        limits = CommandLimits(wall_seconds=30, processes=_LEAST_PROCESSES)
        outside = self.workspace.parent / f".temper-outside-{os.getpid()}"
        program = [self.python, "-I", "-S", "-c", _TRIES_OUT, str(limits.processes), str(outside), str(os.getpid())]
        outcome = replace(self, hosts=AllowedHosts()).run(program, limits)
        reason = outcome.stopped or (last_line(outcome.output) if outcome.status else "")
        if outside.exists():
            outside.unlink()
            reason = "it can write beside its workspace"
        if "processes" in reason:
            reason += " (the kernel exempts root from limits of users: run this as another user)"
        if reason or outcome.status:
            raise self._launch.unavailable(f"a command is not shut in: {reason or outcome.status}")

    def run(
        self, arguments: Sequence[str], limits: CommandLimits, interrupt: Callable[[], None] = lambda: None
    ) -> CommandOutcome:
        """Runs a command in the workspace to its end or to a limit; none of its processes is left then.

        Args:
            arguments: the program, by its path or its name in PATH, and what it is told.
            interrupt: called several times a second; what it raises ends the command.

        Raises:
            SandboxUnavailable: it cannot be shut in, and was not run.
        """
        with contextlib.ExitStack() as stack:
            channel = theirs = None
            if self.hosts:
                channel, theirs = (stack.enter_context(end) for end in socket.socketpair())
                channel.setblocking(False)
            usage = _Usage(self.workspace, limits)
            served = False

            def look() -> None:
                nonlocal served
                interrupt()
                if channel is not None and not served:
                    with contextlib.suppress(BlockingIOError):
                        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
                        served = True
                        for descriptor in descriptors:
                            stack.enter_context(self.hosts.served_on(socket.socket(fileno=descriptor)))

            ended = self._launch.run(
                self._job(arguments, limits, None if theirs is None else theirs.fileno()),
                wall_seconds=limits.wall_seconds,
                output_bytes=limits.output_bytes,
                interrupt=look,
                watch=usage.over,
                channel=theirs,
            )
        status = ended.status if ended.status >= 0 else 128 - ended.status
        stopped = ended.stopped
        if not stopped and status == 128 + signal.SIGXCPU:
            stopped = f"it took more than {limits.cpu_seconds} s of processor time"
        return CommandOutcome(status, ended.printed, stopped)

    def _job(self, arguments: Sequence[str], limits: CommandLimits, channel: int | None) -> dict[str, object]:
        """What the launcher reads."""
        namespaces = self.isolation == Isolation.NAMESPACES
        denied = of_commands(
            confined_signals=namespaces or _landlock_version() >= _LANDLOCK_SCOPES_SIGNALS,
            confined_attributes=namespaces,
            network=channel is not None,
        )
        numbers = calls()
        assert numbers is not None  # noqa: S101 — seen at construction
        own = [*self._launch.reads, *(path for path in _SYSTEM_READS if os.path.exists(path))]
        return {
            "reads": [*own, *(path for path in self.reads if not below(path, own))],
            "limits": {
                "cpu_seconds": limits.cpu_seconds,
                "memory_bytes": limits.memory_bytes,
                "file_bytes": limits.disk_bytes,
                "threads": limits.processes,
                "open_files": _OPEN_FILES,
                "with_others": True,
            },
            "calls": numbers.without(denied),
            "command": {
                "arguments": list(arguments),
                "environment": self._environment(),
                "workspace": str(self.workspace),
                "processes": limits.processes,
                "temporary_bytes": limits.temporary_bytes,
                "listener": channel,
                "port": _PROXY_PORT,
            },
        }

    def _environment(self) -> dict[str, str]:
        namespaces = self.isolation == Isolation.NAMESPACES
        variables = {
            "PATH": f"{os.path.dirname(self.python)}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.workspace),
            "TMPDIR": "/tmp" if namespaces else str(self.workspace),
            "LANG": "C.UTF-8",
        }
        if self.hosts:
            proxy = f"http://127.0.0.1:{_PROXY_PORT}"
            variables |= dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), proxy)
        return variables


def available(workspace: Path, reads: Sequence[str] = (), hosts: AllowedHosts | None = None) -> CommandSandbox:
    """A sandbox that was tried: with namespaces, else with Landlock.

    Raises:
        SandboxUnavailable: neither shuts commands in here; says why of both.
    """
    reasons = []
    for isolation in Isolation:
        try:
            sandbox = CommandSandbox(isolation, workspace, tuple(reads), hosts or AllowedHosts())
            sandbox.check()
        except SandboxUnavailable as error:
            reasons.append(error.message.removeprefix("TEMPER_SANDBOX="))
        else:
            return sandbox
    raise SandboxUnavailable(f"no sandbox works here: {'; '.join(reasons)}")


class _Usage:
    """What the processes of a session take."""

    def __init__(self, workspace: Path, limits: CommandLimits) -> None:
        self._workspace = workspace
        self._limits = limits
        self._free = self._space()
        self._shared = self._shared_anywhere()
        self._began = time.time() - 1  # file systems' clocks are coarse
        self._next_look = self._next_count = 0.0

    def over(self, session: int) -> str:
        """The limit that is passed; empty: none, or it is not yet time to look again."""
        now = time.monotonic()
        if now < self._next_look:
            return ""
        self._next_look = now + _WATCH_SECONDS
        if over := self._over_disk():
            return over
        threads, memory = self._taken(session)
        if threads > self._limits.processes:
            return f"it had more than {self._limits.processes} processes"
        if memory > self._limits.memory_bytes:
            return f"it took more than {self._limits.memory_bytes} bytes of memory"
        if self._shared_anywhere() - self._shared > _ANYBODYS * self._limits.memory_bytes:
            return f"this machine's shared memory grew by more than {_ANYBODYS} times {self._limits.memory_bytes} bytes"
        return ""

    def _over_disk(self) -> str:
        """What the file system lost is cheap to know, but others write to it, too: the workspace's own new files say
        whose it is. Files that have no name any more are among neither, so that a multiple counts in any case."""
        most = self._limits.disk_bytes
        free, files = self._space()
        lost, new = self._free[0] - free, self._free[1] - files
        if lost > _ANYBODYS * most or new > _ANYBODYS * _MOST_NEW_FILES:
            return f"the file system of the workspace lost more than {_ANYBODYS} times {most} bytes"
        now = time.monotonic()
        if (lost > most or new > _MOST_NEW_FILES) and now > self._next_count:
            found, number = self._written()
            self._next_count = time.monotonic() + 10 * (time.monotonic() - now)
            if found > most:
                return f"it wrote more than {most} bytes to the workspace"
            if number > _MOST_NEW_FILES:
                return f"it wrote more than {_MOST_NEW_FILES} files to the workspace"
        return ""

    def _written(self) -> tuple[int, int]:
        """Bytes on disk and number of the workspace's files that were changed since the command began."""
        found = number = 0
        for directory, _, names in os.walk(self._workspace):
            for name in names:
                with contextlib.suppress(OSError):
                    status = os.lstat(os.path.join(directory, name))
                    if status.st_ctime >= self._began:
                        found += status.st_blocks * 512
                        number += 1
        return found, number

    def _space(self) -> tuple[int, int]:
        """Bytes and files that are free."""
        found = os.statvfs(self._workspace)
        return found.f_bfree * found.f_frsize, found.f_ffree

    def _taken(self, session: int) -> tuple[int, int]:
        """Threads of a session, which its processes cannot leave, and bytes of their memory that no file has."""
        threads = own = 0
        shared: dict[str, int] = {}
        for name in os.listdir("/proc"):
            if name.isdecimal():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) == session:
                        threads += int(fields[17])
                        sizes = _sizes(f"/proc/{name}/status")
                        own += sizes.get("RssAnon", 0)
                        shared[name] = sizes.get("RssShmem", 0)
        if any(shared.values()) and own + sum(shared.values()) > self._limits.memory_bytes:
            # What several of them share counts once; finding out takes longer.
            for name in shared:
                with contextlib.suppress(OSError):
                    shared[name] = _sizes(f"/proc/{name}/smaps_rollup").get("Pss_Shmem", shared[name])
        return threads, own + sum(shared.values())

    def _shared_anywhere(self) -> int:
        """Bytes of shared memory of this machine: some of it may be in no process any more. 0: it is not told."""
        with contextlib.suppress(OSError):
            return _sizes("/proc/meminfo").get("Shmem", 0)
        return 0


def _sizes(file: str) -> dict[str, int]:
    """Bytes of each entry that /proc has in kB."""
    entries = (line.split() for line in Path(file).read_text().splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): 1024 * int(size) for name, size, _ in entries}


def _landlock_version() -> int:
    """0: the kernel has none."""
    return max(0, int(ctypes.CDLL(None).syscall(_LANDLOCK_CREATE, None, 0, 1)))
