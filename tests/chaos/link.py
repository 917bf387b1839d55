"""Link: a proxy of the project's own on one connection between two parts, which can be made bad."""

from __future__ import annotations

import asyncio
import enum
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from tests.chaos.http_damage import Damage

_PIECE = 64 * 1024
_HEAD_SECONDS = 5.0


class Weather(enum.StrEnum):
    """What a link does to what goes through it."""

    FAIR = "fair"
    SLOW = "slow"
    """Each piece comes `amount` seconds late."""
    NARROW = "narrow"
    """At most `amount` bytes a second in each direction."""
    SILENT = "silent"
    """Half-open: connections are accepted and stay, and nothing gets through."""
    RESET = "reset"
    """Connections are cut, the ones that are there and the ones to come."""
    ANSWERS = "answers"
    """HTTP only: whoever asks gets the status `amount`, and the server does not hear of it."""
    DAMAGED = "damaged"
    """HTTP only: a byte of every `amount`-th object is another than was stored, the first one's to begin with."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Bad weather of a link."""

    weather: Weather = Weather.FAIR
    amount: float = 0.0

    def __post_init__(self) -> None:
        if (self.amount > 0) != (self.weather in (Weather.SLOW, Weather.NARROW, Weather.ANSWERS, Weather.DAMAGED)):
            raise ValueError(f"malformed {self}")


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection as a machine does that has forgotten it: the other end gets a reset, not an end."""
    with suppress(OSError):
        _socket(writer).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _socket(writer: asyncio.StreamWriter) -> socket.socket:
    found: socket.socket = writer.get_extra_info("socket")
    return found


class Link:
    """Listens on a free port and passes on what it gets to ``host:port``.

    Args:
        name: of the two ends, for logs.
        http: it is followed as HTTP, so that objects can be damaged.
    """

    def __init__(self, name: str, host: str, port: int, *, http: bool = False) -> None:
        self.name = name
        self.port = 0
        self.connections = 0
        """Accepted since the start."""
        self.bodies = 0
        """Objects that came by while they were damaged, the whole ones too."""
        self._there = host, port
        self._http = http
        self._fault = Fault()
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Cuts everything."""
        self.become(Fault(Weather.RESET))
        if self._server is not None:
            self._server.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._server.wait_closed(), _HEAD_SECONDS)

    def become(self, fault: Fault) -> None:
        """Changes the weather at once, also for what is on its way."""
        self._fault = fault
        self._changed.set()
        self._changed = asyncio.Event()
        if fault.weather in (Weather.RESET, Weather.ANSWERS):  # what is kept alive would not notice
            for writer in self._writers:
                _reset(writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self._fault.weather is Weather.RESET:
            _reset(writer)
            return
        if self._fault.weather is Weather.ANSWERS:
            await self._answer(reader, writer)
            return
        try:
            there_reader, there = await asyncio.open_connection(*self._there)
        except OSError:
            _reset(writer)
            return
        damage = Damage()
        ends = {writer, there}
        self._writers |= ends
        pumps = [
            asyncio.create_task(self._pump(reader, there, damage, out=True)),
            asyncio.create_task(self._pump(there_reader, writer, damage, out=False)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._writers -= ends
            for end in ends:
                end.close()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, damage: Damage, *, out: bool
    ) -> None:
        with suppress(OSError):
            while data := await source.read(_PIECE):
                await self._hold(len(data))
                if self._http:
                    data = self._passed(data, damage, out)
                sink.write(data)
                await sink.drain()

    def _passed(self, data: bytes, damage: Damage, out: bool) -> bytes:
        """What comes out at the other end."""
        if out:
            damage.request(data)
            return data
        for at in damage.answer(data):
            if self._fault.weather is Weather.DAMAGED:
                if self.bodies % int(self._fault.amount) == 0:
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                self.bodies += 1
        return data

    async def _hold(self, size: int) -> None:
        """Waits as long as the weather makes a piece wait."""
        while self._fault.weather is Weather.SILENT:
            await self._changed.wait()
        seconds = {Weather.SLOW: self._fault.amount, Weather.NARROW: size / (self._fault.amount or 1.0)}
        wait = seconds.get(self._fault.weather, 0.0)
        if wait:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>chaos</Message></Error>"
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_SECONDS)
            sent = b"" if head.startswith(b"HEAD") else body
            writer.write(
                f"HTTP/1.1 {self._fault.amount:.0f} chaos\r\nContent-Type: application/xml\r\n"
                f"Content-Length: {len(sent)}\r\nConnection: close\r\n\r\n".encode()
                + sent
            )
            await writer.drain()
        writer.close()
