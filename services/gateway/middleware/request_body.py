"""Request bodies: decoded where they are compressed, bounded in bytes, memory and time."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from backports import zstd
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.core.errors import error_response

_PIECE_BYTES = 64 * 1024
"""Decoded at once, so that a limit behind stops a bomb before it has exploded."""
_MOST_CODINGS = 3
_ZSTD_WINDOW_BITS = 23
"""8 MiB, the window that RFC 8878, 3.1.1.1.2 asks every decoder for; a larger one would be the client's to choose."""


class BodyDecoding:
    """Decodes bodies in gzip, deflate and zstd (RFC 9110, 8.4) while they are read. Any other coding is a 415.

    The limits of what it surrounds hold for the decoded bytes; the coded ones may be as many.

    Args:
        app: what it surrounds.
        limit: bytes that the body of a request may have.
    """

    def __init__(self, app: ASGIApp, limit: Callable[[Scope], int]) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        codings = _codings(scope) if scope["type"] == "http" else []
        if not codings:
            await self._app(scope, receive, send)
            return
        unknown = [coding for coding in codings if coding not in _FRAMES]
        if unknown or len(codings) > _MOST_CODINGS:
            names = f"the content-encoding {unknown[0]!r}" if unknown else f"more than {_MOST_CODINGS} codings"
            known = ", ".join(_FRAMES)
            message = f"{names} cannot be decoded here: send the body as it is, or in one of {known}"
            refusal = error_response(
                message,
                status=415,
                code="unsupported_content_encoding",
                headers={"accept-encoding": known},
                route=scope["path"],
            )
            await refusal(scope, receive, send)
            return
        # What the length was of is not what is read.
        headers = [(name, value) for name, value in scope["headers"] if name not in _OF_CODED_BODIES]
        body = _Decoded(receive, [_Decoder(_FRAMES[coding]) for coding in reversed(codings)], self._limit(scope))
        scope["headers"] = headers
        await self._app(scope, body.receive, send)


_OF_CODED_BODIES = frozenset({b"content-encoding", b"content-length"})


def _codings(scope: Scope) -> list[str]:
    """Codings of the body, in the order in which they were applied."""
    listed = ",".join(Headers(scope=scope).getlist("content-encoding")).lower().split(",")
    return [coding for part in listed if (coding := part.strip()) not in ("", "identity")]


class _Broken(Exception):
    """Bytes that are not what ``content-encoding`` says."""


class _Frame(Protocol):
    """A gzip member, a zlib stream or a zstd frame: what bodies are made of."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _ZlibFrame:
    """zlib's, which keeps input that it has not used by itself, as zstd's does."""

    def __init__(self, window: int) -> None:
        self._inner = zlib.decompressobj(window)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)


def _gzip(_: int) -> _Frame:
    return _ZlibFrame(16 + zlib.MAX_WBITS)


def _deflate(first: int) -> _Frame:
    """Decoder of deflate: with zlib's wrapper, as RFC 9110, 8.4.1.2 has it, or without, as some clients have always
    sent it."""
    wrapped = first & 0x0F == zlib.DEFLATED and first >> 4 <= 7
    return _ZlibFrame(zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)


def _zstd(_: int) -> _Frame:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_BITS})


_FRAMES: Mapping[str, Callable[[int], _Frame]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "zstd": _zstd,
}
"""Constructors of decoders by content coding; each is given the first byte of the frame."""


@dataclass(slots=True)
class _Decoder:
    """Undoes one coding of a body: frames, one behind the other."""

    open: Callable[[int], _Frame]
    _frame: _Frame | None = None

    @property
    def whole(self) -> bool:
        """True if the body may end here."""
        return self._frame is None or self._frame.eof

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Pieces of what ``data`` decodes to.

        Raises:
            _Broken: it cannot be decoded.
        """
        while True:
            if self._frame is None or self._frame.eof:
                if not data:
                    return
                self._frame = self.open(data[0])
            try:
                piece = self._frame.decompress(data, _PIECE_BYTES)
            except (zlib.error, zstd.ZstdError) as error:
                raise _Broken(str(error)) from error
            data = self._frame.unused_data if self._frame.eof else b""
            if piece:
                yield piece
            elif not data:
                return


@dataclass(slots=True)
class _Decoded:
    """One body.

    ``coded``: where it comes from. ``decoders``: in the order in which they are applied. ``limit``: of coded bytes.
    """

    coded: Receive
    decoders: list[_Decoder]
    limit: int
    _seen: int = 0
    _complete: bool = False
    _pieces: Iterator[bytes] = field(default_factory=lambda: iter(()))

    async def receive(self) -> Message:
        """A piece of the body, and behind it what the client does."""
        if not self.decoders:
            return await self.coded()
        while True:
            try:
                piece = next(self._pieces, None)
                if piece is not None:
                    return {"type": "http.request", "body": piece, "more_body": True}
                if self._complete:
                    return self._end()
            except _Broken as error:
                # An HTTPException, because that is the one kind that FastAPI lets through while it reads a body.
                raise HTTPException(400, f"the request body is not what its content-encoding says: {error}") from error
            message = await self.coded()
            if message["type"] != "http.request":
                return message
            data = message.get("body", b"")
            self._complete = not message.get("more_body", False)
            self._seen += len(data)
            if self._seen > self.limit:
                raise HTTPException(413, f"the request body is over the limit of {self.limit} bytes, coded as it is")
            self._pieces = _through(self.decoders, data)

    def _end(self) -> Message:
        if not all(decoder.whole for decoder in self.decoders):
            raise _Broken("it ends too early")
        self.decoders = []
        return {"type": "http.request", "body": b"", "more_body": False}


def _through(decoders: list[_Decoder], data: bytes) -> Iterator[bytes]:
    if not decoders:
        yield data
        return
    for piece in decoders[0].feed(data):
        yield from _through(decoders[1:], piece)


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
