"""Worker processes of `tests.integration.toy`, forked from one that has imported everything: a start of its own takes
three seconds of a processor, most of them for torch. What runs afterwards is the same."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.integration.toy"])


def _run(environment: Mapping[str, str], log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    from tests.integration import toy

    toy.main()


class ToyProcess:
    """One worker process, with the methods of subprocess.Popen that tests use.

    Args:
        environment: on top of this process's own.
        log: file that gets its standard error, appended.
    """

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._process = _CONTEXT.Process(target=_run, args=({**os.environ, **environment}, log))
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status: minus the signal's number if one killed it."""
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise TimeoutError(f"process {self._process.pid} still runs after {timeout} s")
        return status

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
