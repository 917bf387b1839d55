"""Samples that are being drawn, and their answers until a client has asked for them.

A sample runs in the gateway that took it. Redis has where it stands, so that a client may ask any gateway; without
Redis only the one that runs it can tell.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import structlog

from services.common.errors import TemperError, Unavailable
from services.common.settings import CommonSettings
from services.common.shutdown import cancel_and_wait
from services.common.storage.redis import call_async, connect_async
from services.gateway.core.errors import status_of

_KEPT_SECONDS = 600.0
_KEPT_BYTES = 256 * 2**20
"""Answers of one gateway."""
_RUNNING_SECONDS = 15
"""Time after which a sample counts as lost whose gateway has not said that it runs."""
_LOOK_SECONDS = 0.1
_AWAY_SECONDS = 5.0
"""Pause after Redis was away, in which nothing is told: a sample must not wait for it."""
State: TypeAlias = Literal["running", "done", "failed", "lost"]
log = structlog.get_logger("tinker")


@dataclass(frozen=True, slots=True)
class Outcome:
    """State of a sample. ``lost``: it may succeed if it is asked for again."""

    state: State
    answer: bytes = b""
    message: str = ""
    user: bool = False
    """The client is to blame that it failed."""

    def packed(self) -> str:
        return json.dumps([self.state, base64.b64encode(self.answer).decode(), self.message, self.user])

    @classmethod
    def unpacked(cls, text: str) -> Outcome:
        state, answer, message, user = json.loads(text)
        return cls(state, base64.b64decode(answer), message, user)


_RUNNING = Outcome("running")


class Samples:
    """Samples of one gateway. Used from its event loop.

    Args:
        settings: of Redis.
    """

    def __init__(self, settings: CommonSettings) -> None:
        self._redis = connect_async(settings)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: OrderedDict[str, tuple[float, Outcome]] = OrderedDict()
        self._bytes = 0
        self._away_until = 0.0
        self._renewing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to tell other gateways which samples run here."""
        self._renewing = asyncio.create_task(self._renew())

    async def begin(self, name: str, draw: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        """Begins a sample; the same name again is the same sample.

        Args:
            draw: to the encoded answer.
        """
        if self.known(name):
            return
        self._tasks[name] = asyncio.create_task(self._draw(name, draw))
        await self._tell(name, _RUNNING)

    def known(self, name: str) -> bool:
        """Whether this gateway runs it, or has its answer."""
        return name in self._tasks or name in self._ended

    async def outcome(self, name: str, seconds: float) -> Outcome:
        """The outcome, or that it still runs after ``seconds``; lost, if nobody knows of it.

        Raises:
            Unavailable: another gateway may have it, and Redis is away.
        """
        if (task := self._tasks.get(name)) is not None:
            await asyncio.wait((task,), timeout=seconds)
        if (ended := self._ended.get(name)) is not None:
            return ended[1]
        if name in self._tasks:
            return _RUNNING
        until = time.monotonic() + seconds
        while True:
            found = await self._ask(name)
            if found.state != "running" or time.monotonic() + _LOOK_SECONDS > until:
                return found
            await asyncio.sleep(_LOOK_SECONDS)

    def cancel(self, name: str) -> None:
        """Ends a sample that runs here."""
        if (task := self._tasks.get(name)) is not None:
            task.cancel()

    async def stop(self) -> None:
        """Ends all samples: they are lost, and their clients ask another gateway for them again."""
        if self._renewing is not None:
            await cancel_and_wait(self._renewing)
        for task in list(self._tasks.values()):
            await cancel_and_wait(task)
        await self._redis.aclose()

    async def _draw(self, name: str, draw: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        outcome = Outcome("lost", message="the sample was cancelled")
        try:
            outcome = await _drawn(draw)
        finally:
            del self._tasks[name]
            self._keep(name, outcome)
            await self._tell(name, outcome)

    def _keep(self, name: str, outcome: Outcome) -> None:
        now = time.monotonic()
        self._ended[name] = now, outcome
        self._bytes += len(outcome.answer)
        while self._ended:
            at, oldest = next(iter(self._ended.values()))
            if self._bytes <= _KEPT_BYTES and now - at < _KEPT_SECONDS:
                break
            self._ended.popitem(last=False)
            self._bytes -= len(oldest.answer)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RUNNING_SECONDS / 3)
            for name in list(self._tasks):
                await self._tell(name, _RUNNING, renewed=True)

    async def _tell(self, name: str, outcome: Outcome, *, renewed: bool = False) -> None:
        if time.monotonic() < self._away_until:
            return
        seconds = _RUNNING_SECONDS if outcome is _RUNNING else int(_KEPT_SECONDS)
        try:
            # What runs is renewed only where it still stands: it may have ended meanwhile.
            if renewed:
                await call_async(lambda: self._redis.expire(_key(name), seconds, gt=True))
            else:
                await call_async(lambda: self._redis.set(_key(name), outcome.packed(), ex=seconds))
        except Unavailable as error:  # whoever asks this gateway is answered all the same
            self._away_until = time.monotonic() + _AWAY_SECONDS
            log.warning("sample.untold", error=error.message)

    async def _ask(self, name: str) -> Outcome:
        text = await call_async(lambda: self._redis.get(_key(name)))
        return Outcome("lost", message="nobody knows of this sample any more") if text is None else _read(text)


async def _drawn(draw: Callable[[], Coroutine[Any, Any, bytes]]) -> Outcome:
    try:
        return Outcome("done", await draw())
    except TemperError as error:
        status = status_of(error)
        state: State = "lost" if status in (429, 503) else "failed"
        return Outcome(state, message=error.message, user=status < 500)
    except Exception:  # of this sample alone
        log.exception("sample.crashed")
        return Outcome("failed", message="internal error; the log has the details")


def _read(text: Any) -> Outcome:
    return Outcome.unpacked(text if isinstance(text, str) else bytes(text).decode())


def _key(name: str) -> str:
    return f"temper:sample:{hashlib.sha256(name.encode()).hexdigest()}"
