"""Servers of environments in this process, each in a thread of its own: ours, and one that misbehaves as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from services.environments.base import Environment
from services.environments.server import create_app


@contextlib.contextmanager
def serving(make: Callable[[], Environment], most_sessions: int = 256) -> Iterator[str]:
    """URL of a server of environments, for as long as the block runs."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(create_app(make, most_sessions), ws="websockets-sansio", log_level="error")
        server = uvicorn.Server(config)
        # Begun before anybody connects: the socket listens already, and connections wait in its queue.
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


class Fault(enum.StrEnum):
    """Faults of a server, each instead of an answer to a reset or a step."""

    SILENT = "silent"
    BROKEN = "broken"
    """The connection is cut without a word."""
    CLOSED = "closed"
    """It is closed in order, in the middle of the episode."""
    NO_JSON = "no_json"
    BINARY = "binary"
    NO_OBJECT = "no_object"
    NO_UNICODE = "no_unicode"
    """A text with half of a surrogate pair, which no tokenizer takes."""
    WRONG_TYPE = "wrong_type"
    NO_OBSERVATION = "no_observation"
    REWARD_TEXT = "reward_text"
    REWARD_INFINITE = "reward_infinite"
    REWARD_NAN = "reward_nan"
    DONE_NUMBER = "done_number"
    OVERSIZED = "oversized"
    CRASHED = "crashed"
    """It says that its code raised."""
    FULL = "full"
    HALF_A_MESSAGE = "half_a_message"


_ANSWERS: dict[Fault, str | bytes] = {
    Fault.NO_JSON: "<html>502 Bad Gateway</html>",
    Fault.BINARY: b"\xff\xfe\x00",
    Fault.NO_OBJECT: "[1, 2, 3]",
    Fault.NO_UNICODE: json.dumps({"type": "observation", "data": {"observation": {"text": "\ud800"}}}),
    Fault.WRONG_TYPE: json.dumps({"type": "state", "data": {}}),
    Fault.NO_OBSERVATION: json.dumps({"type": "observation", "data": {"reward": 1.0, "done": True}}),
    Fault.REWARD_TEXT: json.dumps({"type": "observation", "data": {"observation": {}, "reward": "1", "done": True}}),
    Fault.REWARD_INFINITE: '{"type": "observation", "data": {"observation": {}, "reward": 1e999, "done": true}}',
    Fault.REWARD_NAN: '{"type": "observation", "data": {"observation": {}, "reward": NaN, "done": true}}',
    Fault.DONE_NUMBER: json.dumps({"type": "observation", "data": {"observation": {}, "reward": 1.0, "done": 1}}),
    Fault.OVERSIZED: json.dumps({"type": "observation", "data": {"observation": {"text": "x" * 2**21}}}),
    Fault.CRASHED: json.dumps({"type": "error", "data": {"message": "ZeroDivisionError", "code": "EXECUTION_ERROR"}}),
    Fault.FULL: json.dumps({"type": "error", "data": {"message": "all are taken", "code": "CAPACITY_REACHED"}}),
    Fault.HALF_A_MESSAGE: '{"type": "observation", "data": {"observation": {"text": "Hi',
}


class FaultyServer:
    """Sessions of an environment of which some answers are faults.

    Args:
        share: of the answers that are faults.
        seed: decides which.
        faults: kinds, in turn.
    """

    def __init__(
        self, make: Callable[[], Environment], *, share: float, seed: int, faults: tuple[Fault, ...] = tuple(Fault)
    ) -> None:
        self._make = make
        self._drawn = random.Random(seed)
        self.behave(share, faults)

    def behave(self, share: float, faults: tuple[Fault, ...]) -> None:
        """From now on, with nothing counted yet."""
        self._share = share
        self._next = itertools.cycle(faults)
        self.made: dict[Fault, int] = dict.fromkeys(Fault, 0)
        """Faults so far."""

    @property
    def count(self) -> int:
        """All faults so far."""
        return sum(self.made.values())

    async def session(self, connection: ServerConnection) -> None:
        """One connection."""
        environment = self._make()
        with contextlib.suppress(ConnectionClosed):
            async for message in connection:
                asked = json.loads(message)
                if asked["type"] == "close":
                    return
                if asked["type"] == "state":
                    await connection.send(json.dumps({"type": "state", "data": environment.state}))
                    continue
                if self._drawn.random() < self._share:
                    fault = next(self._next)
                    self.made[fault] += 1
                    await self._misbehave(fault, connection)
                    continue
                await connection.send(json.dumps(_told(environment, asked)))

    async def _misbehave(self, fault: Fault, connection: ServerConnection) -> None:
        match fault:
            case Fault.SILENT:
                await connection.wait_closed()
            case Fault.BROKEN:
                connection.transport.abort()
            case Fault.CLOSED:
                await connection.close()
            case _:
                await connection.send(_ANSWERS[fault])


def _told(environment: Environment, asked: dict[str, Any]) -> dict[str, Any]:
    data = asked.get("data", {})
    if asked["type"] == "reset":
        found = environment.reset(environment.params.model_validate(data))
    else:
        found = environment.step(data)
    return {
        "type": "observation",
        "data": {"observation": dict(found.fields), "reward": found.reward, "done": found.done},
    }


@contextlib.contextmanager
def misbehaving(server: FaultyServer) -> Iterator[str]:
    """URL of a server that misbehaves, for as long as the block runs."""
    ready: threading.Event = threading.Event()
    found: dict[str, Any] = {}

    async def run() -> None:
        ended = asyncio.Event()
        async with serve(server.session, "127.0.0.1", 0, close_timeout=1) as listening:
            port = next(iter(listening.sockets)).getsockname()[1]
            found.update(port=port, loop=asyncio.get_running_loop(), ended=ended)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{found['port']}"
    finally:
        found["loop"].call_soon_threadsafe(found["ended"].set)
        thread.join()
