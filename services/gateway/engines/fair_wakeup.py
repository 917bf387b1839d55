"""Who reads next, when many streams have something new at once.

An engine tells all its requests of a step in one message. If all their readers woke together, a thousand of them would
run for tens of milliseconds before the event loop looks at a socket again, and whoever connects in between would wait
at every step of its way through the gateway. So they wake a few at a time, and everything else runs in between.
"""

from __future__ import annotations

import asyncio
from collections import deque

_AT_ONCE = 2
"""Between two looks at the sockets, which cost a few microseconds (benchmarks/NOTES.md)."""


class Turns:
    """Wakes readers in the order in which they ask for it. Used from one event loop only.

    Args:
        at_once: readers that wake in one iteration of the loop that is running.
    """

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._at_once = at_once
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()

    def wake(self, reader: asyncio.Future[None]) -> None:
        """Sets the result of a future, not necessarily at once."""
        self._waiting.append(reader)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        waiting, left = self._waiting, self._at_once
        while waiting and left:
            reader = waiting.popleft()
            if not reader.done():
                reader.set_result(None)
            left -= 1
        if waiting:
            self._loop.call_soon(self._next)
