"""Runs that are broken off, as kill -9 does it, in processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from services.common.errors import TemperError
from services.engine.models.weights.shards import Progress


def in_child(work: Callable[[], object]) -> int:
    """Runs work in a process of its own; returns how that ended: 3 with an error that tells, a signal below 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except TemperError:
            os._exit(3)
        except BaseException:
            os._exit(4)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(stage: str, done: int) -> Progress:
    """Progress that kills its process, as kill -9 does, once a stage is so far."""

    def tell(what: str, now: int, total: int) -> None:
        del total
        if stage in what and now >= done:
            os.kill(os.getpid(), signal.SIGKILL)

    return tell
