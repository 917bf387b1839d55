"""Work that stops when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from services.gateway.errors import ClientDisconnected

T = TypeVar("T")


async def client_gone(receive: Receive) -> None:
    """Returns when the client closes the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancels a task and waits until it is over, however it ends."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work`` and cancels it when the client disconnects.

    Raises:
        ClientDisconnected: it did.
    """
    task = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(client_gone(request.receive))
    try:
        await asyncio.wait((task, listener), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        await cancel(listener)
        await cancel(task)
