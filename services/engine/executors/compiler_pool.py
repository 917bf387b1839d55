"""Processes that compile kernels, beside the one that launches them. Needs no torch: they start at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType


class CompilerPool(ProcessPoolExecutor):
    """Processes that compile: one a core. They end with this process, however it ends, and what they are at with them:
    the end of a pipe tells them, which nobody else holds.

    Args:
        most: at most so many.
    """

    def __init__(self, most: int = 64) -> None:
        context = multiprocessing.get_context("spawn")
        life, self._life = context.Pipe(duplex=False)
        cores = len(os.sched_getaffinity(0))
        super().__init__(min(cores, most), mp_context=context, initializer=_end_with, initargs=(life,))

    def end(self) -> None:
        """Ends the processes, also in the middle of a kernel: what is not compiled yet fails."""
        self._life.close()
        self.shutdown(wait=False, cancel_futures=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:  # whoever gives up does not wait for kernels
            self.end()
        super().__exit__(kind, error, trace)


def _end_with(life: Connection) -> None:
    """Ends this process, and ptxas where it runs, when the other end of the pipe is closed."""
    os.setpgid(0, 0)

    def wait() -> None:
        with suppress(EOFError, OSError):
            life.recv_bytes()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="life", daemon=True).start()
