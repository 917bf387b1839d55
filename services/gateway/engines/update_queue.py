"""Queues of updates: where those of one HTTP request wait for its handler, and which handler wakes next.

An engine tells all its requests of a step in one message. If all their readers woke together, a thousand of them would
run for tens of milliseconds before the event loop looks at a socket again, and whoever connects in between would wait
at every step of its way through the gateway. So they wake a few at a time, and everything else runs in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from services.common.pb import engine_pb2

_AT_ONCE = 2
"""Between two looks at the sockets, which cost a few microseconds (benchmarks/NOTES.md)."""


class FairWaker:
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


@dataclass(frozen=True, slots=True)
class StreamBroken:
    """The stream that carried a request is gone."""

    reason: str
    final: bool = False
    """The gateway itself ends: no other engine is asked."""


@dataclass(slots=True)
class _Waiting:
    index: int
    item: engine_pb2.Update | StreamBroken


class UpdateQueue:
    """A queue of (index of the request, update) for one reader.

    An update that arrives while one of the same request still waits is joined to it: a client that reads slowly gets
    fewer, longer pieces, and the gateway has less to do when it is behind.

    Args:
        waker: when the reader may go on; it need not wait for the first item.
    """

    def __init__(self, waker: FairWaker) -> None:
        self._waker = waker
        self._begun = False
        self._items: deque[_Waiting] = deque()
        self._open: dict[int, engine_pb2.Update] = {}
        """The update of each request that waits and can still grow."""
        self._reader: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False

    def put(self, index: int, item: engine_pb2.Update | StreamBroken) -> None:
        """Adds an item; the caller gives the update away."""
        if isinstance(item, StreamBroken) or item.HasField("error"):
            self._open.pop(index, None)
        else:
            waiting = self._open.get(index)
            if waiting is not None:
                waiting.MergeFrom(item)
                return
            self._open[index] = item
        self._items.append(_Waiting(index, item))
        first, self._begun = not self._begun, True
        self._wake(at_once=first)

    async def get(self) -> tuple[int, engine_pb2.Update | StreamBroken]:
        """The oldest item.

        Raises:
            TimeoutError: none is there and the time is up.
        """
        while not self._items:
            if self._expired:
                raise TimeoutError
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        waiting = self._items.popleft()
        if self._open.get(waiting.index) is waiting.item:
            del self._open[waiting.index]
        return waiting.index, waiting.item

    def expire_at(self, when: float) -> None:
        """Ends waiting: from this moment of the event loop's clock on, get() does not wait. One timer for the whole
        exchange: a timeout a token would cost more than the token."""
        self._timer = asyncio.get_running_loop().call_at(when, self._expire)

    def close(self) -> None:
        """Nobody reads any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self._expired = True
        self._wake(at_once=True)

    def _wake(self, *, at_once: bool) -> None:
        reader, self._reader = self._reader, None
        if reader is None or reader.done():
            return
        if at_once:
            reader.set_result(None)
        else:
            self._waker.wake(reader)
