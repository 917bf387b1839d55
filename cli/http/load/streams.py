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
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MESSAGE = re.compile(rb'"message": ?("(?:[^"\\]|\\.)*")')
_END_BYTES = 600
"""Bytes that are kept of an answer's end: the last event has the counts of tokens."""
_HEAD_BYTES = 4096
"""Most bytes that are read of an answer that refuses."""
_TOLD = 200
"""Characters that are told of an answer that says nothing else."""


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
    head: bytes = b""
    """The first of what was read, at least its status."""

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
        self._refused = False
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
        if self._refused or (not answer.times and len(answer.head) < 12):
            answer.head += data
            self._refused = len(answer.head) >= 12 and answer.head[9:12] != b"200"
            if self._refused:
                if _is_whole(answer.head):
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
            if not self.answer.status and not self._refused:
                self.answer.status = _broken_off(self.answer, exc)
            self._finish()

    def _finish(self) -> None:
        if not self._done.done():
            if self._refused:
                self.answer.status = _refusal(self.answer.head)
            self._done.set_result(None)

    def close(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.close()


def _is_whole(answer: bytes) -> bool:
    """Whether all is there of an answer that refuses, or enough of it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    enough = length is not None and len(body) >= int(length[1])
    return enough or len(answer) >= _HEAD_BYTES or body.endswith(b"0\r\n\r\n")  # the last: an end of chunks


def _refusal(answer: bytes) -> str:
    """Status of an answer that refuses, with the message that it has."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0][9:].decode("latin-1")
    found = _MESSAGE.search(body)
    try:
        said = json.loads(found[1]) if found else body.decode("utf-8", "replace")
    except ValueError:
        said = ""
    return ": ".join(part for part in (status, " ".join(said.split())[:_TOLD]) if part)


def _broken_off(answer: Answer, error: Exception | None) -> str:
    """What is said of an answer whose connection was closed before its end."""
    reason = "the connection was closed before the answer's end" + (f": {error}" if error else "")
    if answer.events or not answer.end:
        return reason
    body = answer.end.partition(b"\r\n\r\n")[2] or answer.end
    return f"{reason}, which has no event: {' '.join(body.decode('utf-8', 'replace').split())[:_TOLD]}"


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
