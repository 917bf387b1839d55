"""Bodies in memory: how many bytes at once, and for how long one may be on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyMemory:
    """Counts the bytes of all bodies from their announcement to the end of their request, and ends slow ones.

    Large multipart bodies go to disk while they are read, so those are not counted, and only must not stand still.

    Args:
        app: what it surrounds.
        limit: bytes of all bodies together.
        largest: bytes of one; what is announced beyond that is not counted, because it is refused.
        seconds: for a whole body, or between two pieces of an upload.
        is_upload: whether a request is one.
    """

    def __init__(
        self, app: ASGIApp, *, limit: int, largest: int, seconds: float, is_upload: Callable[[Scope], bool]
    ) -> None:
        self._app = app
        self._limit = limit
        self._largest = largest
        self._seconds = seconds
        self._is_upload = is_upload
        self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        upload = self._is_upload(scope)
        announced = 0 if upload else _announced(scope)
        if announced > self._largest:
            announced = 0
        mine = seen = 0
        complete = False
        deadline: float | None = None
        loop = asyncio.get_running_loop()

        def hold(total: int) -> None:
            nonlocal mine
            if total > mine:
                if self.held + total - mine > self._limit:
                    raise _no_room(self._limit)
                self.held += total - mine
                mine = total

        async def receive_counted() -> Message:
            nonlocal seen, complete, deadline
            if complete:
                return await receive()
            hold(announced)
            if deadline is None or upload:
                deadline = loop.time() + self._seconds
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                raise _too_slow(self._seconds) from error
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if not upload:
                    hold(seen)
            complete = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self.held -= mine


def _announced(scope: Scope) -> int:
    length = Headers(scope=scope).get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0


# HTTPExceptions, because those FastAPI lets through while it reads a body.


def _no_room(limit: int) -> HTTPException:
    return HTTPException(
        503, f"the bodies of running requests fill their {limit} bytes: try again shortly", {"retry-after": "1"}
    )


def _too_slow(seconds: float) -> HTTPException:
    message = f"the request body did not arrive within {seconds:g} s: send it faster, or in smaller requests"
    return HTTPException(408, message, {"connection": "close"})


class BodyLimit:
    """Stops reading a body that is over its limit, announced or chunked. The error handlers make it a 413.

    Args:
        app: what it surrounds.
        limit: bytes that the body of a request may have.
    """

    def __init__(self, app: ASGIApp, limit: Callable[[Scope], int]) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        limit = self._limit(scope)
        announced = headers.get("content-length", "")
        if announced.isascii() and announced.isdigit() and len(announced) < 20:
            excess = int(announced) > limit
        else:
            excess = bool(announced)
        seen = 0

        async def receive_limited() -> Message:
            nonlocal seen
            if excess:
                raise _too_large(limit)
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > limit:
                    raise _too_large(limit)
            return message

        await self._app(scope, receive_limited, send)


def _too_large(limit: int) -> HTTPException:
    # An HTTPException, because that is the one kind that FastAPI lets through while it reads a body.
    return HTTPException(413, f"the request body is over the limit of {limit} bytes: split it into smaller requests")
