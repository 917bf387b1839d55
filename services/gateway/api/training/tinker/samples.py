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
_LOOK_SECONDS = 0.1
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
        settings: of Redis, and how long a sample may take.
    """

    def __init__(self, settings: CommonSettings, longest: float) -> None:
        self._redis = connect_async(settings)
        self._longest = longest
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: OrderedDict[str, tuple[float, Outcome]] = OrderedDict()
        self._bytes = 0

    async def begin(self, name: str, draw: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        """Begins a sample; the same name again is the same sample.

        Args:
            draw: to the encoded answer.
        """
        if name in self._tasks or name in self._ended:
            return
        self._tasks[name] = asyncio.create_task(self._draw(name, draw))
        await self._tell(name, _RUNNING)

    def known(self, name: str) -> bool:
        """Whether this gateway runs it, or has its answer."""
        return name in self._tasks or name in self._ended

    async def outcome(self, name: str, seconds: float) -> Outcome:
        """The outcome, or that it still runs after ``seconds``; lost, if nobody knows of it."""
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
        """Ends all samples."""
        for task in list(self._tasks.values()):
            await cancel_and_wait(task)
        await self._redis.aclose()

    async def _draw(self, name: str, draw: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        outcome = Outcome("lost", message="the sample was cancelled")
        try:
            outcome = Outcome("done", await draw())
        except TemperError as error:
            status = status_of(error)
            state: State = "lost" if status in (429, 502, 503) else "failed"
            outcome = Outcome(state, message=error.message, user=status < 500)
        except Exception:  # of this sample alone
            log.exception("sample.crashed")
            outcome = Outcome("failed", message="internal error; the log has the details")
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

    async def _tell(self, name: str, outcome: Outcome) -> None:
        seconds = int(self._longest if outcome is _RUNNING else _KEPT_SECONDS) + 1
        try:
            await call_async(lambda: self._redis.set(_key(name), outcome.packed(), ex=seconds))
        except Unavailable as error:  # whoever asks this gateway is answered all the same
            log.warning("sample.untold", error=error.message)

    async def _ask(self, name: str) -> Outcome:
        text = await call_async(lambda: self._redis.get(_key(name)))
        return Outcome("lost", message="nobody knows of this sample any more") if text is None else _read(text)


def _read(text: Any) -> Outcome:
    return Outcome.unpacked(text if isinstance(text, str) else bytes(text).decode())


def _key(name: str) -> str:
    return f"temper:sample:{hashlib.sha256(name.encode()).hexdigest()}"
