"""Limits: a process that runs out of disk or of memory while it runs, without root."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

_KINDS = {"disk": resource.RLIMIT_FSIZE, "memory": resource.RLIMIT_AS}


@contextmanager
def limited(pid: int, what: str, room: float) -> Iterator[None]:
    """Lets files of a process grow no further than ``room`` bytes ("disk"), or the process map only so many more
    ("memory"), as long as the context lasts. One that ends meanwhile leaves nothing behind."""
    kind = _KINDS[what]
    try:
        process = psutil.Process(pid)
        most = int(room) + (process.memory_info().vms if what == "memory" else 0)
        before = resource.prlimit(pid, kind)
        resource.prlimit(pid, kind, (most, before[1]))
    except (ProcessLookupError, psutil.NoSuchProcess):
        yield
        return
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            if process.is_running():  # its number is not somebody else's by now
                resource.prlimit(pid, kind, before)
