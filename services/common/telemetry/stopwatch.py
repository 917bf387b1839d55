"""Seconds of the phases of a start, for its log lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


class Stopwatch:
    """Measures phases that follow each other.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()

    def lap(self) -> float:
        """Seconds since the last call, or since the beginning, in hundredths."""
        now = self._clock()
        seconds, self._begun = now - self._begun, now
        return round(seconds, 2)


def rate(nbytes: int, seconds: float) -> float:
    """Gigabytes (10⁹) a second, in hundredths; of less than a hundredth of a second as if it were one."""
    return round(nbytes / 1e9 / max(seconds, 0.01), 2)


def process_seconds(proc: Path = Path("/proc")) -> float | None:
    """Seconds since this process began, in tenths; None where the kernel does not say so as Linux does.

    Field 22 of /proc/self/stat is the start in clock ticks since the machine's (proc(5)).
    """
    try:
        uptime = float((proc / "uptime").read_text().split()[0])
        fields = (proc / "self/stat").read_text().rpartition(")")[2].split()
        return round(uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"), 1)
    except (OSError, ValueError, IndexError):
        return None
