"""Streamed completions over bare sockets: a client cheap enough not to be what is measured.

It parses nothing but what it counts: events ("data: {") and the end of a stream. Each process handles a share of the
connections; all requests start together.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

_EVENT, _DONE = b"data: {", b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Load:
    """Load that one run sends."""

    host: str
    port: int
    model: str
    prompt_tokens: int
    new_tokens: int
    vocab_size: int
    usage: bool = False
    """Ask for the counts at the end."""


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
            self._head += data[:64]
            if len(self._head) >= 12 and self._head[9:12] != b"200":
                answer.status = (self._head + data)[:400].decode("latin-1")
                self._finish()
                return
        answer.end = (answer.end + data)[-600:]
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


def request_bytes(load: Load, rng: random.Random) -> bytes:
    """POST /v1/completions with random tokens, streamed."""
    body = {
        "model": load.model,
        "prompt": [rng.randrange(load.vocab_size) for _ in range(load.prompt_tokens)],
        "max_tokens": load.new_tokens,
        "temperature": 1,
        "ignore_eos": True,
        "stream": True,
        # A random model samples tokens that are no text; with their ids every token is an event.
        "return_token_ids": True,
        "stream_options": {"include_usage": load.usage},
    }
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {load.host}\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(payload) + payload


async def _share(load: Load, count: int, seed: int, go: Any) -> list[Answer]:
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    requests = [request_bytes(load, rng) for _ in range(count)]
    futures = [loop.create_future() for _ in range(count)]
    connections: list[Connection] = []
    for future in futures:
        _, protocol = await loop.create_connection(partial(Connection, future), load.host, load.port)
        connections.append(protocol)
    await asyncio.to_thread(go.wait)
    for connection, request in zip(connections, requests, strict=True):
        connection.send(request)
    await asyncio.gather(*futures)
    for connection in connections:
        connection.close()
    return [connection.answer for connection in connections]


def _worker(load: Load, count: int, seed: int, go: Any, results: Any) -> None:
    import uvloop

    try:
        results.put(uvloop.run(_share(load, count, seed, go)))
    except Exception as error:
        results.put(f"{type(error).__name__}: {error}")


def run_load(load: Load, requests: int, *, processes: int, seed: int = 0) -> list[Answer]:
    """Sends all requests at once and waits for the answers.

    Raises:
        RuntimeError: one of them failed.
    """
    context = multiprocessing.get_context("spawn")
    processes = min(processes, requests)
    shares = [requests // processes + (index < requests % processes) for index in range(processes)]
    go, results = context.Barrier(processes), context.Queue()
    workers = [
        context.Process(target=_worker, args=(load, share, seed * 1000 + index, go, results), daemon=True)
        for index, share in enumerate(shares)
    ]
    for worker in workers:
        worker.start()
    answers: list[Answer] = []
    try:
        for _ in workers:
            part: Sequence[Answer] | str = results.get(timeout=600)
            if isinstance(part, str):
                raise RuntimeError(part)
            answers += part
    finally:
        for worker in workers:
            worker.join(5)
            worker.kill()
    failed = [answer.status for answer in answers if answer.status]
    if failed:
        raise RuntimeError(f"{len(failed)} of {requests} requests failed, the first with: {failed[0]}")
    return answers
