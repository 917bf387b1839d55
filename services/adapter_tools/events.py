"""Events of a tool that the command line runs as a process of its own: one JSON object a line on standard output.

{"event": "progress", "stage", "done", "total"}, at the end {"event": "result", …} or {"event": "error", "message",
"code", "param"}. Exit status 0 or 1, or 143 after SIGTERM, which leaves nothing behind.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from services.common.errors import TemperError

_EVERY_SECONDS = 0.1


class _Stopped(BaseException):
    """SIGTERM: unwinds, so that scratch directories are removed."""


class Reporter:
    """Progress a few times a second."""

    def __init__(self) -> None:
        self._last = 0.0
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage == self._stage and done < total and now - self._last < _EVERY_SECONDS:
            return
        self._last, self._stage = now, stage
        _emit("progress", stage=stage, done=done, total=total)


def _emit(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def run_to_the_end(work: Callable[[], Mapping[str, Any]]) -> int:
    """Does the tool's work, whose return value is the result, and writes what came of it. Returns the exit status."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        result = work()
    except TemperError as error:
        _emit("error", message=error.message, code=error.code, param=error.param)
        return 1
    except ModuleNotFoundError as error:
        _emit(
            "error",
            message=f"{error.name} is not installed here: this command needs the engine's packages, "
            "pip install 'temper[engine]'",
            code="not_installed",
            param=None,
        )
        return 1
    except (_Stopped, KeyboardInterrupt):
        return 143
    _emit("result", **result)
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise _Stopped
