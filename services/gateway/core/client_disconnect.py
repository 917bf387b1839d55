"""Work that stops when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from services.gateway.core.errors import ClientDisconnected

T = TypeVar("T")


async def client_gone(receive: Receive) -> None:
    """Returns when the client closes the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


class ClientWatch:
    """Cancels the task that is in the block when its client goes away. The body must have been read.

    The work is not a task of its own: to begin one, to wait for it and to end its listener are some ten turns of the
    event loop, each of them behind whatever else is ready.

    Raises:
        ClientDisconnected: at the end of the block, if that is what ended it.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._gone = False

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        if self._task is None:
            raise RuntimeError("a client is watched on behalf of a task")
        self._cancelling = self._task.cancelling()
        self._listener = asyncio.ensure_future(client_gone(self._receive))
        self._listener.add_done_callback(self._left)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        self._listener.cancel()
        # As asyncio.timeout does it: somebody else may have cancelled the task as well, and that goes first.
        if self._gone and task is not None and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientDisconnected from error

    def _left(self, listener: asyncio.Future[None]) -> None:
        if listener.cancelled():
            return
        listener.exception()
        if self._task is not None:
            self._gone = True
            self._task.cancel()


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits ``work``, which is cancelled when the client disconnects.

    Raises:
        ClientDisconnected: it did.
    """
    async with ClientWatch(request.receive):
        return await work
