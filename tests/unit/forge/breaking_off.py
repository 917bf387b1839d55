"""Runs that are broken off, as kill -9 does it, in processes of their own."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.common.errors import TemperError
from tests.forked import CONTEXT


def in_child(work: Callable[..., object], *args: Any) -> int:
    """Runs work in a process of its own; returns how that ended: 3 with an error that tells, a signal below 0.

    The tests' process is not forked: its other tests left threads of native libraries in it, whose locks and pools
    a fork has without the threads.

    Args:
        work, args: a function of a module and what it is called with, both to be pickled.
    """
    child = CONTEXT.Process(target=_run, args=(work, args))
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def _run(work: Callable[..., object], args: tuple[Any, ...]) -> None:
    try:
        work(*args)
    except TemperError:
        os._exit(3)
    except BaseException:
        traceback.print_exc()
        os._exit(4)
    os._exit(0)


@dataclass(frozen=True)
class KilledAt:
    """Progress that kills its process, as kill -9 does, once a stage is so far."""

    stage: str
    done: int

    def __call__(self, what: str, now: int, total: int) -> None:
        del total
        if self.stage in what and now >= self.done:
            os.kill(os.getpid(), signal.SIGKILL)
