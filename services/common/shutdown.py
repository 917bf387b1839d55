"""Requests to stop: a process by SIGTERM or Ctrl-C, once or twice, and a task by a cancellation.

A service that is process 1 of a container gets no default action for SIGTERM: the kernel drops a signal that it has no
handler for (man 7 pid_namespaces). So every way out here is a handler's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from types import FrameType
from typing import Any, Literal, TypeAlias

import structlog

ASLEEP = "asleep: POST /v1/engine/wake, or `temper engine wake`, takes it back to work"
"""Answer of an engine that sleeps to everything but that."""
SleepLevel: TypeAlias = Literal["cache", "weights", "process"]
"""What a sleeping engine gives back: its caches; its weights, too, which wait in host memory; or all that its process
has of the device."""
CLOSE_SECONDS = 10
"""Time that a service may need beyond the times that its settings give to others: see docs/guides/operations.md."""
_SAME_REQUEST_SECONDS = 2.0
"""Time after the first signal within which another one is the same request: a terminal's Ctrl-C reaches the whole
process group, and the supervisor passes it on."""

log = structlog.get_logger(__name__)


class StopSignals:
    """Signals that asked the process to stop."""

    def __init__(self) -> None:
        self._first: float | None = None

    def repeated(self) -> bool:
        """Takes a signal. True if it is a second request, which means: stop at once."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
        return now - self._first > _SAME_REQUEST_SECONDS


def end_now(number: int) -> None:
    """Ends the process without waiting for anything, with the status that a shell gives to a process that a signal
    ended."""
    log.warning("asked to stop again, ending now")
    sys.stderr.flush()
    os._exit(128 + number)


def end_on_signals() -> None:
    """Makes SIGTERM and Ctrl-C end the process with status 0, until a service has handlers of its own."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as the signal module calls it
    raise SystemExit(0)


async def cancel_and_wait(task: asyncio.Future[Any], *, again_seconds: float = 10.0) -> None:
    """Cancels a task and waits until it is over, however it ends.

    Args:
        again_seconds: after which it is cancelled once more: longer than it needs to clean up. A cancellation can get
            lost, because Python 3.11's asyncio.wait_for, which redis-py writes with, drops one that comes at the moment
            in which what it waits for ends.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=again_seconds)
    if not task.cancelled():
        task.exception()
