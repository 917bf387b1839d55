"""Python's garbage collector, kept out of the way of streams.

A full collection stops the process for about a microsecond an object, and every open stream has a few hundred: with a
thousand streams all of them stood still for 0.2 to 0.4 s several times a minute, and nothing was ever found, as
references are counted and requests leave no cycles (measured by benchmarks.gateway.load). So only the youngest objects
are looked at while requests run, and all of them when none does, or when that has not been for long.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

_YOUNG = 5_000
"""Objects that are made and not freed between two looks at the youngest: some milliseconds."""
_NEVER = 1_000_000_000
_LOOK_SECONDS = 1.0
_PAUSE_SECONDS = 60.0
_OVERDUE_SECONDS = 3600.0


class QuietCollector:
    """Collects everything in quiet moments. One a process, whose collector it takes over with ``run``.

    Args:
        busy: whether anybody would notice a pause now.
        pause_seconds: between two collections.
        overdue_seconds: after so long it collects all the same.
        look_seconds: how often it looks whether the moment is quiet.
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        *,
        pause_seconds: float = _PAUSE_SECONDS,
        overdue_seconds: float = _OVERDUE_SECONDS,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._busy = busy
        self._pause = pause_seconds
        self._overdue = overdue_seconds
        self._look = look_seconds
        self.collections = 0

    async def run(self) -> None:
        """Until cancelled; then the collector is as it was."""
        thresholds = gc.get_threshold()
        gc.collect()
        gc.freeze()  # modules and routes: they stay, there is nothing to look for in them
        gc.set_threshold(_YOUNG, _NEVER, _NEVER)
        loop = asyncio.get_running_loop()
        last = loop.time()
        try:
            while True:
                await asyncio.sleep(self._look)
                since = loop.time() - last
                if since >= self._overdue or (since >= self._pause and not self._busy()):
                    gc.collect()
                    self.collections += 1
                    last = loop.time()
        finally:
            gc.set_threshold(*thresholds)
            gc.unfreeze()
