"""What stands in front of gateways: connections go round robin to those that say they are ready, as kube-proxy's do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from cli.local.ports import ClaimedPort, claim_ports

POLL_SECONDS = 0.5


class Balancer:
    """Passes bytes on. A connection stays where it is; what cannot be connected is closed, and not tried elsewhere.

    Args:
        backends: ports on 127.0.0.1, of which some may not listen yet.
    """

    def __init__(self, backends: Sequence[int]) -> None:
        self._backends = backends
        self._turns = itertools.count()
        self._claim: ClaimedPort
        self._server: asyncio.Server
        self._following: asyncio.Task[None]
        self.ready: list[int] = []
        self.connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._claim.number}"

    async def __aenter__(self) -> Self:
        (self._claim,) = claim_ports(1)
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", self._claim.number)
        self._following = asyncio.create_task(self._follow())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._following.cancel()
        self._server.close()
        self._claim.release()

    async def until_ready(self, *ports: int) -> None:
        """Waits until exactly these get connections."""
        async with asyncio.timeout(60):
            while sorted(self.ready) != sorted(ports):  # noqa: ASYNC110 - what changes it is a poll itself
                await asyncio.sleep(0.05)

    async def _follow(self) -> None:
        while True:
            said = await asyncio.gather(*(self._says_ready(port) for port in self._backends))
            self.ready = [port for port, ready in zip(self._backends, said, strict=True) if ready]
            await asyncio.sleep(POLL_SECONDS)

    async def _says_ready(self, port: int) -> bool:
        try:
            async with asyncio.timeout(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /readyz HTTP/1.1\r\nhost: probe\r\nconnection: close\r\n\r\n")
                status = await reader.readline()
                writer.close()
        except (OSError, TimeoutError):
            return False
        return b" 200 " in status

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        ready = self.ready
        try:
            port = ready[next(self._turns) % len(ready)]
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
        except (ZeroDivisionError, OSError):
            writer.close()
            return
        await asyncio.gather(_copy(reader, to_writer), _copy(to_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
