"""A real server process of a test: start, freeze, kill, start again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

from cli.local.store_processes import LocalServer


class RunningServer:
    """Runs one LocalServer; `restart` uses the same command, so the same port and data."""

    def __init__(self, server: LocalServer) -> None:
        self.server = server
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return self.server.address

    def start(self, timeout: float = 20.0) -> None:
        with (self.server.cwd / "output.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.server.argv, env=dict(self.server.env), cwd=self.server.cwd, stdout=log, stderr=log
            )
        deadline = time.monotonic() + timeout
        while not self.server.is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                text = (self.server.cwd / "output.log").read_text(errors="replace")
                self.stop()
                raise RuntimeError(f"{self.server.name} did not start: {text[-2000:]}")
            time.sleep(0.05)

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> int:
        """Exit status, negative of a server that a signal ended: -9 also if it did not stop in time."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(sig)
        try:
            self._process.wait(self.server.stop_grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        status = self._process.returncode
        self._process = None
        self.server.remove_leftovers()
        return status

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """The process does not run, but its sockets accept: the worst kind of outage."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # The signal stops the threads one by one; only after this no thread can answer any more.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def down(self, sig: signal.Signals = signal.SIGKILL) -> Iterator[None]:
        """Stopped inside the block, started again after it."""
        self.stop(sig)
        try:
            yield
        finally:
            self.start()
