"""Server-sent events that end with their client."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol, Self

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.shutdown import cancel_and_wait
from services.gateway.core.client_disconnect import ClientWatch
from services.gateway.core.errors import ClientDisconnected

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(data: Any, *, name: str | None = None, event_id: str | None = None) -> bytes:
    """One event with a JSON payload."""
    head = (f"id: {event_id}\n" if event_id else "") + (f"event: {name}\n" if name else "")
    return head.encode() + b"data: " + to_json(data, inf_nan_mode="null") + b"\n\n"


class ChunkTemplate:
    """The events of a stream that differ in a few values only: all else is encoded once.

    Args:
        write: encodes such an event from its values, by the same code as any other event of the stream. It is called
            once, with marks in the place of the values.
        values: how many there are. A value may occur more than once.
    """

    def __init__(self, write: Callable[..., bytes], values: int) -> None:
        marks = [uuid.uuid4().hex.encode() for _ in range(values)]
        head, *parts = re.split(b'"(' + b"|".join(marks) + b')"', write(*(mark.decode() for mark in marks)))
        found = [marks.index(mark) for mark in parts[::2]]
        if set(found) != set(range(values)):
            raise ValueError("the event does not contain each of its values")
        self._head = head
        self._parts = [*zip(found, parts[1::2], strict=True)]

    def fill(self, *values: Any) -> bytes:
        """The event with these values."""
        encoded = [to_json(value, inf_nan_mode="null") for value in values]
        pieces = [self._head]
        for number, piece in self._parts:
            pieces += (encoded[number], piece)
        return b"".join(pieces)


class Events(Protocol):
    """Encoded events, as an async generator yields them."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """The events."""
        ...

    async def aclose(self) -> None:
        """Nobody reads on."""
        ...


class EventStream(Response):
    """Sends what a generator yields, closes the generator when the client goes, and keeps a silent stream open.

    Args:
        events: encoded events. It is always closed, also when the response is never sent to the end.
        keep_alive: seconds of silence after which a comment is sent.
        longest: seconds after which the stream is broken off; None: never.
        begun: False: the first event may be a while, so a comment goes ahead of it, for whoever waits for a body.
        on_close: called once when the stream is over, however it ended.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Events,
        *,
        keep_alive: float,
        longest: float | None = None,
        headers: Mapping[str, str] | None = None,
        begun: bool = True,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(status_code=200, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        for name, value in (headers or {}).items():
            self.headers[name] = value
        self._events = events
        self._keep_alive = keep_alive
        self._longest = longest
        self._begun = begun
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A task of its own: every await of an event would otherwise go through the frames of all middleware.
        sender = asyncio.ensure_future(self._send_all(send))
        try:
            async with asyncio.timeout(self._longest) as limit, ClientWatch(receive):
                await sender
        except ClientDisconnected:
            scope["temper.disconnected"] = True
        except TimeoutError:
            if not limit.expired():
                raise
            scope["temper.disconnected"] = True
        finally:
            try:
                await cancel_and_wait(sender)
                await self._events.aclose()
            finally:
                if self._on_close is not None:
                    self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if not self._begun:
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        async with _Ticker(send, self._keep_alive) as ticker:
            async for body in self._events:
                ticker.sent()
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Ticker:
    """Sends a comment whenever nothing else was sent for a while. A timer, and no task: most streams need none."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._send = send
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._sending: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        self._timer = self._loop.call_later(self._seconds, self._tick)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._sending is not None:
            await cancel_and_wait(self._sending)

    def sent(self) -> None:
        """Something else is sent now."""
        self._last = self._loop.time()

    def _tick(self) -> None:
        now = self._loop.time()
        if now - self._last >= self._seconds:
            if self._sending is None or self._sending.done():
                self._sending = asyncio.ensure_future(self._send_comment())
            self._last = now  # also where the comment before still waits for a client that takes nothing
        self._timer = self._loop.call_at(self._last + self._seconds, self._tick)

    async def _send_comment(self) -> None:
        await self._send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
