"""Sends a load from one process."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from cli.http.load.shape import Shape
from cli.http.load.streams import Answer, Connection, post

_PATHS = {"completions": "/completions", "chat": "/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """A server.

    Raises:
        ValueError: the URL is not of http or https.
    """

    url: str
    """With or without /v1 at its end."""
    model: str
    key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            raise ValueError(f"{self.url!r} is not an http:// or https:// URL")

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def tls(self) -> ssl.SSLContext | None:
        if urlsplit(self.url).scheme == "http":
            return None
        return ssl.create_default_context()

    def request(self, body: dict[str, Any], api: str) -> bytes:
        parts = urlsplit(self.url)
        base = parts.path.rstrip("/").removesuffix("/v1")
        return post(parts.netloc.rpartition("@")[2], f"{base}/v1{_PATHS[api]}", body, key=self.key)


async def send(
    target: Target, shape: Shape, *, timeout: float, ended: Callable[[Answer], None] = lambda _: None
) -> list[Answer]:
    """Sends all requests of a load and waits for their answers, in the order of their beginnings.

    Args:
        timeout: seconds after which a request counts as failed.
        ended: called with each answer when it is over.
    """
    requests = [target.request(body, shape.api) for body in shape.bodies(target.model)]
    sender = _Sender(target, timeout, ended)
    if shape.concurrency is not None:
        queue = iter(requests)
        # All that begin together are on open connections: else the server has the first before the last is there.
        opened = await asyncio.gather(*(sender.opened() for _ in range(min(shape.concurrency, shape.requests))))
        parts = await asyncio.gather(*(sender.one_after_the_other(queue, line) for line in opened))
        return sorted([answer for part in parts for answer in part], key=lambda one: one.sent)
    began = asyncio.get_running_loop().time()
    return list(
        await asyncio.gather(
            *(sender.at(began + start, request) for start, request in zip(shape.starts(), requests, strict=True))
        )
    )


@dataclass(frozen=True, slots=True)
class _Line:
    connection: Connection
    done: asyncio.Future[None]


class _Sender:
    def __init__(self, target: Target, timeout: float, ended: Callable[[Answer], None]) -> None:
        self._target, self._timeout, self._ended = target, timeout, ended
        self._tls = target.tls

    async def opened(self) -> _Line | None:
        """A connection; None: it cannot be had, which the request that it is for tells."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._open()
        except (TimeoutError, OSError):
            return None

    async def one_after_the_other(self, requests: Iterator[bytes], line: _Line | None) -> list[Answer]:
        """Answers to what is left of the requests; the first goes over the connection that is open."""
        answers = []
        for request in requests:
            answers.append(await self._one(request, line))
            line = None
        if line is not None:
            line.connection.close()
        return answers

    async def at(self, moment: float, request: bytes) -> Answer:
        await asyncio.sleep(max(0.0, moment - asyncio.get_running_loop().time()))
        return await self._one(request)

    async def _open(self) -> _Line:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        host, port = self._target.address
        _, connection = await loop.create_connection(partial(Connection, done), host, port, ssl=self._tls)
        return _Line(connection, done)

    async def _one(self, request: bytes, line: _Line | None = None) -> Answer:
        """One request on a connection of its own, whose opening is not counted."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout):
                line = line or await self._open()
                try:
                    line.connection.send(request)
                    await line.done
                finally:
                    line.connection.close()
                answer = line.connection.answer
        except TimeoutError:
            answer = Answer(loop.time(), [], 0, f"no end within {self._timeout:g} s")
        except OSError as error:
            answer = Answer(loop.time(), [], 0, f"no connection: {error}")
        if not answer.status and not answer.times:
            answer.status = f"an answer without a token: {answer.end[-200:].decode('utf-8', 'replace')}"
        self._ended(answer)
        return answer
