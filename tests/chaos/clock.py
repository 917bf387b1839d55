"""Clock: a service whose wall clock is moved while it runs: `python -m tests.chaos.clock`, told by CHAOS_CLOCK (a file
with the offset, a double) and CHAOS_MODULE (the service).

What jumps is the wall clock that Python code reads by `time.time`. The monotonic clock does not jump on a real machine
either. `datetime.now` (ends of certificates and of API keys, signatures for S3), and the clocks of Valkey and of the
object store stay: a process that differs from its servers is what a machine without NTP looks like to them.
"""

from __future__ import annotations

import mmap
import os
import runpy
import struct
import time
from pathlib import Path

_FORMAT = struct.Struct("d")


class Offset:
    """Seconds by which a process's clock is off, in a file that it and its tests share."""

    def __init__(self, place: Path) -> None:
        if not place.exists():
            place.write_bytes(_FORMAT.pack(0.0))
        with place.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _FORMAT.size)

    @property
    def seconds(self) -> float:
        return float(_FORMAT.unpack(self._shared[:])[0])

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._shared[:] = _FORMAT.pack(value)


def main() -> None:
    """Becomes the service."""
    offset = Offset(Path(os.environ["CHAOS_CLOCK"]))
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + offset.seconds
    time.time_ns = lambda: real_ns() + int(offset.seconds * 1e9)
    runpy.run_module(os.environ["CHAOS_MODULE"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
