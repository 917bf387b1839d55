"""Connections of simulated gateways to simulated engines: what gRPC offers its caller, without sockets.

A gateway's EngineClient runs on this as it is. A frame takes a fixed time each way, and frames keep their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import grpc
from grpc import aio

from benchmarks.fleet.virtual.engine import VOCABULARY, SimulatedEngine
from services.common.pb import engine_pb2 as pb
from services.common.text.tokenizer import TextCodec
from services.gateway.engines.channel import Channels

ONE_WAY_SECONDS = 0.0002
_TOKENIZER = Path(__file__).resolve().parents[3] / "models" / "tiny"


def _unavailable(details: str) -> aio.AioRpcError:
    return aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), details)


class SimulatedNetwork(Channels):
    """Opens channels to the engines of a fleet, by address.

    Args:
        engines: those that run, as of now; others cannot be reached.
        max_model_len: as the engines tell it.
    """

    def __init__(self, engines: Mapping[str, SimulatedEngine], max_model_len: int) -> None:
        super().__init__()
        self._engines = engines
        self.codec = TextCodec.from_directory(_TOKENIZER)
        self.model = pb.Model(
            name="simulated",
            digest="0" * 64,
            max_model_len=max_model_len,
            vocab_size=VOCABULARY,
            eos_token_ids=self.codec.eos_ids,
            tokenizer_digest=self.codec.digest,
        )

    def open(self, address: str) -> aio.Channel:
        return _Channel(self, address)  # type: ignore[return-value]  # as much of one as the gateway uses

    def engine(self, address: str) -> SimulatedEngine:
        """The engine at an address.

        Raises:
            aio.AioRpcError: none is there.
        """
        engine = self._engines.get(address)
        if engine is None or not engine.alive:
            raise _unavailable(f"nothing listens at {address}")
        return engine


class _Channel:
    """The part of aio.Channel that stubs and EngineClient call."""

    def __init__(self, network: SimulatedNetwork, address: str) -> None:
        self._network = network
        self._address = address

    async def close(self) -> None:
        """There is nothing to close: a stream ends with its call."""

    def unary_unary(self, path: str, **_: Any) -> Callable[..., Awaitable[Any]]:
        answers: dict[str, Callable[[SimulatedEngine, Any], Any]] = {
            "GetModel": lambda _engine, _request: self._network.model,
            "GetStatus": SimulatedEngine.status,
        }
        answer = answers.get(path.rpartition("/")[2])

        async def call(request: Any, **_: Any) -> Any:
            await asyncio.sleep(2 * ONE_WAY_SECONDS)
            engine = self._network.engine(self._address)
            if answer is None:
                raise _unavailable(f"simulated engines have no {path}")
            return answer(engine, request)

        return call

    def unary_stream(self, _path: str, **_: Any) -> Callable[..., AsyncIterator[pb.FileChunk]]:
        async def files(_request: Any, **_: Any) -> AsyncIterator[pb.FileChunk]:
            for name, data in self._network.codec.files.items():
                yield pb.FileChunk(name=name, data=data)

        return files

    def stream_stream(self, _path: str, **_: Any) -> Callable[[], _Stream]:
        return lambda: _Stream(self._network, self._address)

    def stream_unary(self, path: str, **_: Any) -> Callable[..., Any]:
        def call(*_arguments: Any) -> Any:
            raise _unavailable(f"simulated engines have no {path}")

        return call


class _Stream:
    """The call of a gateway's stream to an engine."""

    def __init__(self, network: SimulatedNetwork, address: str) -> None:
        self._network = network
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._engine: SimulatedEngine | None = None
        self._arrived: deque[pb.EngineFrame | None] = deque()
        """Frames that have arrived; None: the stream broke."""
        self._reader: asyncio.Future[None] | None = None

    async def wait_for_connection(self) -> None:
        await asyncio.sleep(2 * ONE_WAY_SECONDS)
        self._engine = self._network.engine(self._address)
        self._engine.join(self)

    async def write(self, frame: pb.ClientFrame) -> None:
        if self._engine is not None:
            self._loop.call_later(ONE_WAY_SECONDS, self._engine.receive, frame, self)

    def deliver(self, frame: pb.EngineFrame) -> None:
        self._loop.call_later(ONE_WAY_SECONDS, self._arrive, frame)

    def break_off(self) -> None:
        self._loop.call_later(ONE_WAY_SECONDS, self._arrive, None)

    def cancel(self) -> None:
        if self._engine is not None:
            self._engine.leave(self)

    def _arrive(self, frame: pb.EngineFrame | None) -> None:
        self._arrived.append(frame)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.EngineFrame:
        while not self._arrived:
            self._reader = self._loop.create_future()
            await self._reader
        frame = self._arrived.popleft()
        if frame is None:
            raise _unavailable("the connection was reset")
        return frame
