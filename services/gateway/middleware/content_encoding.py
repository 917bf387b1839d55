"""Compressed request bodies (RFC 9110, 8.4): decoded while they are read, so that nothing behind knows of it."""

from __future__ import annotations

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
    """Decodes bodies in gzip, deflate and zstd. A request in another coding is a 415.

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
"""How a frame is opened, by its first byte."""


@dataclass(slots=True)
class _Decoder:
    """Undoes one coding of a body: frames, one behind the other."""

    open: Callable[[int], _Frame]
    _frame: _Frame | None = None

    @property
    def whole(self) -> bool:
        """Whether the body may end here."""
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
