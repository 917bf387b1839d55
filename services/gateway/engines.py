"""All engines: which are ready, which one gets a request, and what happens to requests when one dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import structlog

from services.common.errors import (
    CheckpointRejected,
    DeadlineExceeded,
    Unavailable,
)
from services.common.pb import adapters_pb2, engine_pb2
from services.common.text.tokenizer import TextCodec
from services.gateway.access.caller import TokenAccount, seconds_left
from services.gateway.engine_client import EngineClient
from services.gateway.errors import engine_error
from services.gateway.inbox import EngineLost, Inbox
from services.gateway.routing import affinity_key, choose
from services.gateway.settings import GatewaySettings
from services.gateway.text.vocabulary import Vocabulary

log = structlog.get_logger(__name__)

_RETRYABLE = (engine_pb2.ERROR_CODE_UNAVAILABLE, engine_pb2.ERROR_CODE_OVERLOADED)


class ServedModel:
    """The model behind the engines and its tokenizer: the same for all of them.

    Args:
        info: what the engine says about it.
        codec: built from the engine's tokenizer files.
    """

    def __init__(self, info: engine_pb2.Model, codec: TextCodec) -> None:
        self.info = info
        self.codec = codec
        self.vocabulary = Vocabulary(codec)


class EnginePool:
    """The engines named in the settings.

    Args:
        settings: addresses, intervals and limits.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self.created = int(time.time())
        self._model: ServedModel | None = None
        self._model_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_ready = float("-inf")
        self._waiters: set[asyncio.Future[None]] = set()
        self.clients = tuple(
            EngineClient(
                address,
                status_interval=settings.status_interval_seconds,
                on_model=self._accept_model,
                on_change=self._wake,
            )
            for address in settings.engine_addresses
        )

    # -- life

    def start(self) -> None:
        """Begins to connect; returns at once."""
        for client in self.clients:
            self._tasks.add(asyncio.create_task(client.run(), name=f"engine {client.address}"))

    async def stop(self) -> None:
        """Closes all connections; requests that still run are aborted by their engines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- facts

    @property
    def ready(self) -> bool:
        """At least one engine takes requests."""
        return any(client.ready for client in self.clients)

    @property
    def served(self) -> ServedModel:
        """The model.

        Raises:
            Unavailable: no engine has been reached yet.
        """
        if self._model is None:
            reasons = "; ".join(f"{client.address}: {client.last_error}" for client in self.clients)
            raise Unavailable(f"no engine has been reached yet ({reasons or 'TEMPER_ENGINES is empty'})", retry_after=2)
        return self._model

    @property
    def info(self) -> engine_pb2.Model | None:
        """The model's facts, if an engine has been reached."""
        return None if self._model is None else self._model.info

    @property
    def attached(self) -> str | None:
        """The version attached to the base model's name, as a ready engine reports it."""
        for client in self.clients:
            if client.status is not None:
                return client.status.attached_adapter or None
        return None

    async def _accept_model(self, client: EngineClient, info: engine_pb2.Model) -> None:
        """Checks that an engine serves the same model as the others; fetches the tokenizer if it is new."""
        async with self._model_lock:
            others = [c for c in self.clients if c is not client and c.model is not None]
            different = next((c for c in others if c.model is not None and c.model.digest != info.digest), None)
            if different is not None:
                raise CheckpointRejected(
                    f"engine {client.address} serves {info.name} ({info.digest[:12]}) but {different.address} another "
                    "checkpoint: all engines of a gateway must serve the same"
                )
            if self._model is None or self._model.info.tokenizer_digest != info.tokenizer_digest:
                files = await client.tokenizer_files()
                codec = await asyncio.to_thread(TextCodec, files)
                if codec.digest != info.tokenizer_digest:
                    raise CheckpointRejected(
                        f"engine {client.address}: the tokenizer files have digest {codec.digest[:12]}, announced was "
                        f"{info.tokenizer_digest[:12]}"
                    )
                self._model = ServedModel(info, codec)
            elif self._model.info != info:
                self._model = ServedModel(info, self._model.codec)
            client.model = info

    def _wake(self) -> None:
        if self.ready:
            self._last_ready = asyncio.get_running_loop().time()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- requests

    async def pick(
        self, request: engine_pb2.GenerateRequest, *, avoid: EngineClient | None, deadline: float
    ) -> EngineClient:
        """An engine for a request. Waits for one until ``deadline`` (loop time) if one was ready a short while ago.

        Raises:
            Unavailable: there is none.
        """
        loop = asyncio.get_running_loop()
        while True:
            usable = {client.address: client for client in self.clients if client.ready}
            others = {address: client for address, client in usable.items() if client is not avoid}
            if usable:
                candidates = others or usable
                holding = [a for a, c in candidates.items() if _holds(c, request.adapter)]
                loads = {address: client.load for address, client in candidates.items()}
                return candidates[choose(affinity_key(request), loads, holding=holding)]
            now = loop.time()
            if now >= deadline or now - self._last_ready > self._settings.engine_retry_seconds:
                raise Unavailable("no engine is ready to take requests", retry_after=2.0)
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait((waiter,), timeout=min(0.5, deadline - now))
            finally:
                self._waiters.discard(waiter)

    def exchange(self, requests: Sequence[engine_pb2.GenerateRequest]) -> Exchange:
        """All engine requests of one HTTP request."""
        return Exchange(self, requests, self._settings)

    # -- other calls

    async def sync_adapters(self) -> list[adapters_pb2.SyncResponse]:
        """Makes every connected engine read the adapter pointers, within a bounded time. Failures are logged: an
        engine that was not reached reads them at its next poll."""
        connected = [client for client in self.clients if client.connected]
        results = await asyncio.gather(
            *(client.sync_adapters(timeout=self._settings.sync_timeout_seconds) for client in connected),
            return_exceptions=True,
        )
        answers: list[adapters_pb2.SyncResponse] = []
        for client, result in zip(connected, results, strict=True):
            if isinstance(result, adapters_pb2.SyncResponse):
                answers.append(result)
            else:
                log.warning("engine did not sync its adapters", engine=client.address, error=str(result))
        return answers

    async def validate_adapter(self, files: dict[str, bytes]) -> adapters_pb2.ValidateResponse:
        """Has one engine bind an adapter strictly.

        Raises:
            AdapterRejected: it does not bind.
            Unavailable: no engine can be asked.
        """
        for client in self.clients:
            if client.connected:
                return await client.validate_adapter(files, timeout=self._settings.validate_timeout_seconds)
        raise Unavailable("no engine is there to check the adapter", retry_after=2.0)

    async def rollouts(self, completion_ids: Sequence[str], *, at_least: int) -> dict[str, engine_pb2.Rollout]:
        """Finished completions by id, from all engines; those that none remembers are absent.

        Args:
            completion_ids: ids to look up; one completion may be asked for under two names.
            at_least: how many a caller needs.

        Raises:
            Unavailable: fewer were found and not every engine could be asked.
        """
        found: dict[str, engine_pb2.Rollout] = {}
        results = await asyncio.gather(
            *(client.rollouts(completion_ids, timeout=10.0) for client in self.clients), return_exceptions=True
        )
        for result in results:
            if not isinstance(result, BaseException):
                found.update((rollout.completion_id, rollout) for rollout in result)
        failed = next((result for result in results if isinstance(result, BaseException)), None)
        if len(found) < at_least and failed is not None:
            raise failed
        return found


def _holds(client: EngineClient, adapter: engine_pb2.AdapterRef) -> bool:
    if adapter.WhichOneof("ref") != "named" or client.status is None:
        return False
    named = adapter.named
    wanted = f"{named.name}@{named.version}" if named.version else f"{named.name}@"
    return any(v == wanted or (not named.version and v.startswith(wanted)) for v in client.status.loaded_adapters)


class Exchange:
    """The engine requests of one HTTP request, as one stream of (index, update).

    Use as an async context manager: leaving it aborts what has not finished. A request without any update yet is sent
    again, to another engine or to the same one when it is back; one that has begun fails with its engine.
    """

    def __init__(
        self, pool: EnginePool, requests: Sequence[engine_pb2.GenerateRequest], settings: GatewaySettings
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._settings = settings
        self._inbox = Inbox()
        self._at: dict[int, EngineClient] = {}
        self._begun: set[int] = set()
        self._open = set(range(len(requests)))
        self._retry_until = 0.0
        self._first_refusal: float | None = None
        self._account = TokenAccount(requests)

    async def __aenter__(self) -> Self:
        await self._account.reserve()
        now = asyncio.get_running_loop().time()
        self._retry_until = now + self._settings.engine_retry_seconds
        # The engine's own deadline comes first.
        self._inbox.expire_at(now + seconds_left(self._settings.request_timeout_seconds) + 2.0)
        try:
            for index in range(len(self._requests)):
                await self._place(index)
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
        """The next update.

        Raises:
            Unavailable: an engine died after it had begun to answer, or none is left.
            TemperError: what an engine answered instead of tokens.
            DeadlineExceeded: the request's time is up.
        """
        while self._open:
            index, item = await self._receive()
            if index not in self._open:
                continue
            if isinstance(item, EngineLost):
                await self._lost(index, item.reason)
                continue
            if item.HasField("error"):
                await self._failed(index, item.error)
                continue
            self._account.update(index, len(item.token_ids), first=index not in self._begun)
            self._begun.add(index)
            if item.finish_reason != engine_pb2.FINISH_REASON_UNSPECIFIED:
                self._open.discard(index)
            if item.finish_reason in (engine_pb2.FINISH_REASON_ABORT, engine_pb2.FINISH_REASON_ERROR):
                raise Unavailable("the engine ended the request before it was finished", retry_after=1.0)
            return index, item
        raise StopAsyncIteration

    def finish(self, index: int, *, keep_tokens: int) -> None:
        """The text of a request is complete after its first ``keep_tokens`` tokens: the engine may stop."""
        self._open.discard(index)
        self._at[index].abort(self._requests[index].request_id, keep_tokens=keep_tokens)

    async def _receive(self) -> tuple[int, engine_pb2.Update | EngineLost]:
        try:
            return await self._inbox.get()
        except TimeoutError as error:
            raise DeadlineExceeded(
                "the request was not finished in time: within x-request-timeout-seconds, or the "
                f"{self._settings.request_timeout_seconds:g} s that this gateway allows"
            ) from error

    async def _place(self, index: int, *, avoid: EngineClient | None = None) -> None:
        request = self._requests[index]
        client = await self._pool.pick(request, avoid=avoid, deadline=self._retry_until)
        self._at[index] = client
        client.submit(request, index, self._inbox)

    async def _lost(self, index: int, reason: str) -> None:
        if index in self._begun:
            raise Unavailable(f"the engine was lost while it answered ({reason})", retry_after=1.0)
        self._retry_until = asyncio.get_running_loop().time() + self._settings.engine_retry_seconds
        await self._place(index)

    async def _failed(self, index: int, error: engine_pb2.Error) -> None:
        retryable = error.code in _RETRYABLE and index not in self._begun
        elsewhere = any(client.ready and client is not self._at[index] for client in self._pool.clients)
        now = asyncio.get_running_loop().time()
        if self._first_refusal is None:
            self._first_refusal = now
            self._retry_until = now + self._settings.engine_retry_seconds
        in_time = now < self._first_refusal + self._settings.engine_retry_seconds
        if retryable and in_time and (elsewhere or error.code == engine_pb2.ERROR_CODE_UNAVAILABLE):
            if not elsewhere:
                await asyncio.sleep(0.2)
            await self._place(index, avoid=self._at[index])
            return
        raise engine_error(error)

    def _abort_all(self) -> None:
        self._inbox.close()
        self._account.settle()
        for index in self._open:
            if index in self._at:
                self._at[index].abort(self._requests[index].request_id)
        self._open.clear()
