"""Streamed completions over bare sockets: a client cheap enough not to be what is measured.

It parses nothing but what it counts: events ("data: {") and the end of a stream.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

_EVENT, _DONE = b"data: {", b"data: [DONE]"
_ERROR = re.compile(rb'data: (\{\s*"(?:error"|object":\s*"error").*)', re.DOTALL)
_COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')
_END_BYTES = 600
"""Bytes that are kept of an answer's end: the last event has the counts of tokens."""


@dataclass(slots=True)
class Answer:
    """One request as its client saw it; times are monotonic() seconds, comparable between processes of a machine."""

    sent: float
    times: list[float]
    """Times at which a read brought at least one event."""
    events: int
    status: str
    """Empty if it went well."""
    end: bytes = b""
    """The last of what was read."""

    @property
    def tokens(self) -> int:
        """Tokens that the server counted, if the request asked it to; else the events, of which each had a token."""
        found = _COUNT.findall(self.end)
        return int(found[-1]) if found else self.events

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def last(self) -> float:
        return self.times[-1]


class Connection(asyncio.Protocol):
    """One request on a connection of its own; ``done`` gets a result when the stream is over, however it ends."""

    def __init__(self, done: asyncio.Future[None]) -> None:
        self._done = done
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._head = b""
        self.answer = Answer(0.0, [], 0, "")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's methods, not its classes.
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes) -> None:
        """Sends the whole request; the answer's clock begins."""
        if self._transport is None:
            raise RuntimeError("send() before the connection is open")
        self.answer.sent = time.monotonic()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        answer = self.answer
        if not answer.times and len(self._head) < 12:
            self._head += data
            if len(self._head) >= 12 and self._head[9:12] != b"200":
                answer.status = self._head[:400].decode("latin-1")
                self._finish()
                return
        answer.end = (answer.end + data)[-_END_BYTES:]
        # The end of a stream that failed; the connection may stay open, and some servers send [DONE] behind it.
        if b'"error"' in data and (failure := _ERROR.search(answer.end)):
            answer.status = failure[1][:400].decode("utf-8", "replace")
            self._finish()
            return
        text = self._tail + data
        events = text.count(_EVENT)
        if events:
            answer.events += events
            answer.times.append(now)
        if _DONE in text:
            self._finish()
            return
        # What may be the beginning of a marker that the next read completes; never a whole one, which was counted.
        keep = text[-(len(_DONE) - 1) :]
        begun = keep.rfind(b"data: {")
        self._tail = keep[begun + 1 :] if begun >= 0 else keep

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self.answer.status = self.answer.status or f"the connection was closed early: {exc}"
            self._done.set_result(None)

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def close(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.close()


def post(host: str, path: str, body: Mapping[str, Any], *, key: str = "") -> bytes:
    """The bytes of a POST request with a JSON body.

    Args:
        host: with its port where that is not the usual one.
        key: API key; empty: none.
    """
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    if key:
        head += f"authorization: Bearer {key}\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(payload) + payload
