"""Where the updates of one HTTP request wait for its handler."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from services.common.pb import engine_pb2
from services.gateway.engines.fair_wakeup import Turns


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The stream that carried a request is gone."""

    reason: str
    final: bool = False
    """The gateway itself ends: no other engine is asked."""


@dataclass(slots=True)
class _Waiting:
    index: int
    item: engine_pb2.Update | EngineLost


class Inbox:
    """A queue of (index of the request, update) for one reader.

    An update that arrives while one of the same request still waits is joined to it: a client that reads slowly gets
    fewer, longer pieces, and the gateway has less to do when it is behind.

    Args:
        turns: when the reader may go on; it need not wait for the first item.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._begun = False
        self._items: deque[_Waiting] = deque()
        self._open: dict[int, engine_pb2.Update] = {}
        """The update of each request that waits and can still grow."""
        self._reader: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False

    def put(self, index: int, item: engine_pb2.Update | EngineLost) -> None:
        """Adds an item; the caller gives the update away."""
        if isinstance(item, EngineLost) or item.HasField("error"):
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

    async def get(self) -> tuple[int, engine_pb2.Update | EngineLost]:
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
            self._turns.wake(reader)
