"""Processes forked from one that has imported torch, the trainer's worker and the command line. A start of its own
takes one to three seconds of a processor, nearly all of them for imports. What runs afterwards is the same."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.integration.toy", "cli.main"])
"""Starts processes that have the imports and no thread of the tests' own: what a fork of the tests would inherit."""


class ForkedProcess:
    """One process, with the methods of subprocess.Popen that tests use.

    Args:
        target, args: what it runs; a function of a module.
        environment: its whole environment.
        log: file that gets its standard error, appended.
        output: file that gets its standard output; None: where the tests' own goes.
        directory: where it works; None: where the tests do.
    """

    def __init__(
        self,
        target: Callable[..., None],
        *args: Any,
        environment: Mapping[str, str],
        log: Path,
        output: Path | None = None,
        directory: Path | None = None,
    ) -> None:
        places = (log, output, directory)
        self._process = CONTEXT.Process(target=_run, args=(target, args, dict(environment), *places))
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


def _run(
    target: Callable[..., None],
    args: tuple[Any, ...],
    environment: dict[str, str],
    log: Path,
    output: Path | None,
    directory: Path | None,
) -> None:
    for file, number in ((output, 1), (log, 2)):
        if file is not None:
            with file.open("ab") as opened:
                os.dup2(opened.fileno(), number)
    if directory is not None:
        os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


def toy_worker() -> None:
    """A worker process of `tests.integration.toy`."""
    from tests.integration import toy

    toy.main()


def pod_worker() -> None:
    """A pod's process of `tests.integration.pod_worker`."""
    from tests.integration import pod_worker

    pod_worker.main()


def small_worker() -> None:
    """A worker process of `tests.integration.small_jobs`."""
    from tests.integration import small_jobs

    small_jobs.main()


def command_line(*words: str) -> None:
    """`temper` with these words behind it."""
    from cli.main import run

    sys.argv = ["temper", *words]
    run()
