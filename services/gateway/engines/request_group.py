"""The engine requests of one HTTP request, and what happens to them when an engine refuses or dies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from services.common.errors import DeadlineExceeded, Unavailable
from services.common.pb import engine_pb2
from services.gateway.auth.caller import TokenAccount, seconds_left
from services.gateway.core.errors import engine_error
from services.gateway.engines.client import EngineClient
from services.gateway.engines.load_balancing import Affinity, Route, route_of
from services.gateway.engines.update_queue import FairWaker, StreamBroken, UpdateQueue
from services.gateway.settings import GatewaySettings

_RETRYABLE = (engine_pb2.ERROR_CODE_UNAVAILABLE, engine_pb2.ERROR_CODE_OVERLOADED)
_RUNNING = engine_pb2.FINISH_REASON_UNSPECIFIED
_BROKEN_OFF = (engine_pb2.FINISH_REASON_ABORT, engine_pb2.FINISH_REASON_ERROR)
_PAUSE = 0.2
"""Seconds before the engine that has just refused is asked again; doubled each time."""
_LONGEST_PAUSE = 2.0
_KEEP_SECONDS = 5.0
"""Seconds for which an answer whose text has ended waits for the engine to say that it keeps the rollout."""
_KEPT = engine_pb2.Update(kept=True)
_TOGETHER = 16
"""Choices of one prompt that go to one engine: it reads the prompt once for all of them, and a step for so many takes
little longer than a step for one."""


class Engines(Protocol):
    """Engines that a request group may ask."""

    async def pick(
        self, route: Route, affinity: Affinity, *, avoid: frozenset[EngineClient], deadline: float
    ) -> EngineClient:
        """An engine, not of ``avoid`` if there is another; waits for one until ``deadline`` (loop time)."""
        ...

    def joined(self, client: EngineClient, route: Route) -> bool:
        """A request is to go where other choices of its prompt are; False: that engine may be given none."""
        ...

    def untried(self, tried: frozenset[EngineClient]) -> bool:
        """True if an engine that takes requests is not among ``tried``."""
        ...

    def retried(self, reason: str) -> None:
        """A request is sent again."""
        ...

    @property
    def waker(self) -> FairWaker:
        """Wakes the request groups that have something new."""
        ...


class RequestGroup:
    """All updates as one stream of (index, update).

    Use as an async context manager: leaving it aborts what has not finished. A request without any update yet is sent
    again, to another engine or to the same one when it is back; one that has begun fails with its engine.

    Args:
        engines: who may be asked.
        requests: equally many for each prompt, those of one prompt in a row.
        prompts: token ids.
        settings: how often and for how long.
        affinity: what the client says about its engine.
    """

    def __init__(
        self,
        engines: Engines,
        requests: Sequence[engine_pb2.GenerateRequest],
        prompts: Sequence[Sequence[int]],
        settings: GatewaySettings,
        affinity: Affinity,
    ) -> None:
        self._engines = engines
        self._requests = requests
        self._prompts = prompts
        self._settings = settings
        self._affinity = affinity
        self._queue = UpdateQueue(engines.waker)
        self._routes: dict[int, Route] = {}
        self._at: dict[int, EngineClient] = {}
        self._attempts = [0] * len(requests)
        self._tried: list[frozenset[EngineClient]] = [frozenset()] * len(requests)
        """Engines that have refused the request, or were lost with it."""
        self._begun: set[int] = set()
        self._open = set(range(len(requests)))
        self._keeping: dict[int, asyncio.TimerHandle] = {}
        """Timers of the requests whose text has ended and whose rollout the engine is to keep as it is, by index."""
        self._expires = 0.0
        self._first_refusal: float | None = None
        self._account = TokenAccount(requests)

    async def __aenter__(self) -> Self:
        await self._account.reserve()
        now = asyncio.get_running_loop().time()
        # The engine's own deadline comes first.
        self._expires = now + seconds_left(self._settings.request_timeout_seconds) + 2.0
        self._queue.expire_at(self._expires)
        try:
            for index in range(len(self._requests)):
                await self._place(index, until=now + self._settings.engine_retry_seconds)
        except BaseException:
            self._abort_all()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort_all()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, engine_pb2.Update]:
        """The next update; behind ``finish``, once the engine has done it or is gone, one with ``kept``.

        Raises:
            Unavailable: an engine died after it had begun to answer, or none is left.
            TemperError: what an engine answered instead of tokens.
            DeadlineExceeded: the request's time is up.
        """
        while self._open or self._keeping:
            try:
                index, item = await self._queue.get()
            except TimeoutError as error:
                if self._open:
                    raise self._late() from error
                index, item = next(iter(self._keeping)), _KEPT
            if index in self._keeping and (isinstance(item, StreamBroken) or item.kept):
                self._keeping.pop(index).cancel()
                self._at[index].abort(self._requests[index].request_id)  # waits for it no longer, if it is late
                return index, _KEPT
            if index not in self._open:
                continue
            if isinstance(item, StreamBroken):
                await self._lost(index, item)
                continue
            if item.HasField("error"):
                await self._failed(index, item.error)
                continue
            self._account.update(index, len(item.token_ids), first=index not in self._begun)
            self._begun.add(index)
            reason = item.finish_reason
            if reason != _RUNNING:
                self._open.discard(index)
                if reason in _BROKEN_OFF:
                    raise Unavailable("the engine ended the request before it was finished", retry_after=1.0)
            return index, item
        raise StopAsyncIteration

    def finish(self, index: int, *, keep_tokens: int) -> None:
        """The text of a request is complete after its first ``keep_tokens`` tokens: the engine may stop."""
        self._open.discard(index)
        tells = self._at[index].keep(self._requests[index].request_id, keep_tokens, index, self._queue)
        patience = _KEEP_SECONDS if tells else 0.0
        late = asyncio.get_running_loop().call_later(patience, self._queue.put, index, engine_pb2.Update(kept=True))
        self._keeping[index] = late

    def session(self, index: int) -> dict[str, str] | None:
        """The client's session and the engine that a request of it went to; None without a session."""
        if self._affinity.session is None:
            return None
        return {"id": self._affinity.session, "engine": self._at[index].id}

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the request was not finished within {self._settings.request_timeout_seconds:g} s")

    def _route(self, index: int) -> Route:
        """Route of a request; the choices of one prompt share it, for the hashes of a long one take a millisecond."""
        number = index * len(self._prompts) // len(self._requests)
        if number not in self._routes:
            self._routes[number] = route_of(self._requests[index], self._prompts[number], self._affinity)
        return self._routes[number]

    async def _place(self, index: int, *, until: float) -> None:
        route, tried = self._route(index), self._tried[index]
        client = self._at.get(self._first(index))
        if client is None or tried or not self._engines.joined(client, route):
            client = await self._engines.pick(route, self._affinity, avoid=tried, deadline=min(until, self._expires))
        if asyncio.get_running_loop().time() >= self._expires:
            raise self._late()
        self._attempts[index] += 1
        self._at[index] = client
        client.submit(self._requests[index], index, self._queue, route)

    def _first(self, index: int) -> int:
        """Index of the first of the choices that go together with this one."""
        of_its_prompt = index % (len(self._requests) // len(self._prompts))
        return index - of_its_prompt % _TOGETHER

    async def _lost(self, index: int, lost: StreamBroken) -> None:
        reason = lost.reason
        if lost.final:
            raise Unavailable(reason, retry_after=1.0)
        if index in self._begun:
            raise Unavailable(f"the engine was lost while it answered ({reason})", retry_after=1.0)
        if self._attempts[index] >= self._settings.engine_attempts:
            raise Unavailable(
                f"{self._attempts[index]} engines were lost with the request before they answered it ({reason})",
                retry_after=2.0,
            )
        self._tried[index] |= {self._at[index]}
        self._engines.retried("lost")
        await self._place(index, until=asyncio.get_running_loop().time() + self._settings.engine_retry_seconds)

    async def _failed(self, index: int, error: engine_pb2.Error) -> None:
        loop = asyncio.get_running_loop()
        if self._first_refusal is None:
            self._first_refusal = loop.time()
        until = self._first_refusal + self._settings.engine_retry_seconds
        self._tried[index] |= {self._at[index]}
        untried = self._engines.untried(self._tried[index])
        retryable = error.code in _RETRYABLE and index not in self._begun and loop.time() < until
        # All that are full are not asked again: the client is told to wait, by the one that knows for how long.
        worthwhile = untried or error.code == engine_pb2.ERROR_CODE_UNAVAILABLE
        if not (retryable and worthwhile and self._attempts[index] < self._settings.engine_attempts):
            raise engine_error(error)
        if not untried:
            await asyncio.sleep(min(_PAUSE * 2 ** (self._attempts[index] - 1), _LONGEST_PAUSE))
        self._engines.retried("refused")
        await self._place(index, until=until)

    def _abort_all(self) -> None:
        self._account.settle()
        self._queue.close()
        for timer in self._keeping.values():
            timer.cancel()
        for index in self._open | self._keeping.keys():
            if index in self._at:
                self._at[index].abort(self._requests[index].request_id)
        self._open.clear()
        self._keeping.clear()
