"""The connection to one engine: a stream for all requests, the model's facts, and a status that is polled."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from hashlib import blake2b

import structlog
from grpc import aio

from services.common.errors import TemperError, Unavailable
from services.common.pb import (
    adapters_pb2_grpc,
    engine_pb2,
    engine_pb2_grpc,
    histories_pb2_grpc,
    sessions_pb2_grpc,
)
from services.gateway.engines.channel import Channels
from services.gateway.engines.circuit_breaker import BreakerPolicy, CircuitBreaker
from services.gateway.engines.in_flight import InFlightRequest, InFlightRequests
from services.gateway.engines.load_balancing import (
    TOKENS_PER_REQUEST,
    Candidate,
    Route,
    holds,
    named_adapter,
)
from services.gateway.engines.prefix_index import BLOCK_TOKENS, PrefixIndex, joined
from services.gateway.engines.update_queue import StreamBroken, UpdateQueue

log = structlog.get_logger(__name__)

_CALLS_SECONDS = 130.0
"""Longer than any call beside the stream takes, but for the export of a large session."""

ModelHandler = Callable[["EngineClient", engine_pb2.Model], Awaitable[None]]
_RUNNING = engine_pb2.FINISH_REASON_UNSPECIFIED
_BROKEN_OFF = (engine_pb2.FINISH_REASON_ABORT, engine_pb2.FINISH_REASON_ERROR)
_FAULTS = (engine_pb2.ERROR_CODE_INTERNAL, engine_pb2.ERROR_CODE_UNSPECIFIED)
"""Errors that are the engine's own."""


class EngineClient:
    """One engine. ``run`` keeps it connected; everything else may be called at any time from the same event loop.

    Args:
        address: host:port.
        status_interval: seconds between two GetStatus calls.
        stale_after: seconds that a GetStatus call may take; then the engine gets nothing new until it answers one.
        prefix_blocks: how much is remembered of what it was given.
        breaker: when it is given nothing because it fails.
        on_model: awaited with the model's facts before the engine gets requests. It sets ``model``; an exception keeps
            the engine out.
        on_change: called when readiness or load may have changed.
        channels: opens the connection.
    """

    def __init__(
        self,
        address: str,
        *,
        status_interval: float,
        stale_after: float,
        prefix_blocks: int,
        breaker: BreakerPolicy,
        on_model: ModelHandler,
        on_change: Callable[[], None],
        channels: Channels,
    ) -> None:
        self.address = address
        self.id = "engine-" + blake2b(address.encode(), digest_size=4).hexdigest()
        """Id of the engine for clients: their answers do not show addresses of a cluster."""
        self.name = ""
        """Name that the engine gives itself; empty: it has not been heard yet, or is of an earlier release."""
        self.model: engine_pb2.Model | None = None
        self.status: engine_pb2.EngineStatus | None = None
        self.last_error = "not connected yet"
        self.instance = ""
        """Identity of the engine's process, as last heard: training sessions are named after it."""
        self.away_since: float | None = None
        """Loop time at which the connection was lost; None: it never was there, or it is."""
        self.leaving_since: float | None = None
        """Loop time since which discovery does not name it any more; None: it does."""
        self.breaker = CircuitBreaker(breaker, asyncio.get_running_loop().time)
        self.prefixes = PrefixIndex(prefix_blocks)
        self._interval = status_interval
        self._stale_after = stale_after
        self._on_model = on_model
        self._on_change = on_change
        self._requests = InFlightRequests()
        self._keeping: dict[str, tuple[int, UpdateQueue]] = {}
        """Indexes and queues of the requests that wait until the engine has kept their rollout, by request id."""
        self._others = engine_pb2.Load()  # of other gateways' requests there, as last heard
        self._heard = 0  # number of the last prompt of all gateways that the engine has told
        self._outgoing: asyncio.Queue[engine_pb2.ClientFrame] | None = None
        self._channels = channels
        self._channel: aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()
        """Channels that calls still run on, and that nothing else will use."""
        self.patience = _CALLS_SECONDS
        """Seconds that a channel stays open for the calls on it; 0: the gateway is about to exit."""
        self._opened_with = ""
        """The fingerprint of the certificates that the channel was opened with."""

    # -- state

    @property
    def connected(self) -> bool:
        """The stream is open."""
        return self._outgoing is not None

    @property
    def ready(self) -> bool:
        """New requests may be sent."""
        known = self.connected and self.status is not None and not self.status.draining
        return known and self.leaving_since is None

    @property
    def idle(self) -> bool:
        """Nothing that was begun there would be lost with the connection."""
        return not len(self._requests) and (self.status is None or not self.status.sessions_open)

    @property
    def in_flight(self) -> int:
        """Requests there that have not ended."""
        return len(self._requests)

    @property
    def load(self) -> float:
        """Requests there, of this gateway and of others, and prompt tokens that wait, in requests."""
        prefill = self._requests.prefill + self._others.prefill_tokens
        return len(self._requests) + self._others.requests + prefill / TOKENS_PER_REQUEST

    def candidate(self, route: Route) -> Candidate:
        """Candidate for a route: what routing has to know of this engine."""
        matched = self.prefixes.matched(route.chain)
        if not route.adapter:
            return Candidate(self.address, self.load, matched=matched)
        held = self._requests.begun(route.adapter) or self._holds(route.adapter)
        return Candidate(
            self.address, self.load, holds=held, expects=not held and self._expects(route.adapter), matched=matched
        )

    def _holds(self, adapter: str) -> bool:
        loaded = () if self.status is None else self.status.loaded_adapters
        return any(holds(version, adapter) for version in loaded)

    def _expects(self, adapter: str) -> bool:
        asked = () if self.status is None else self.status.waiting_adapters
        return self._requests.names(adapter) or adapter.removesuffix("@") in asked

    # -- requests

    def submit(self, request: engine_pb2.GenerateRequest, index: int, queue: UpdateQueue, route: Route) -> None:
        """Sends a request; its updates, or one StreamBroken, arrive in ``queue`` together with ``index``."""
        if self._outgoing is None:
            queue.put(index, StreamBroken(self.last_error))
            return
        cached = self.prefixes.matched(route.chain) * BLOCK_TOKENS
        predicted = self.prefixes.route(route.chain, route.tokens)
        sent = InFlightRequest(
            index,
            queue,
            named_adapter(request),
            max(0, route.tokens - cached),
            None if request.pooling or request.HasField("prompt_logprobs") else predicted,
        )
        request.prefix_hashes, request.expected_prefill = joined(route.chain), sent.prefill
        if request.deadline_unix_ms:
            request.timeout_ms = max(1, request.deadline_unix_ms - int(time.time() * 1000))
        self._requests.add(request.request_id, sent)
        self.breaker.sent(request.request_id)
        self._outgoing.put_nowait(engine_pb2.ClientFrame(submit=request))

    def abort(self, request_id: str) -> None:
        """Ends a request that nobody waits for any more."""
        self._keeping.pop(request_id, None)
        if self._drop(request_id) and self._outgoing is not None:
            abort = engine_pb2.AbortRequest(request_id=request_id)
            self._outgoing.put_nowait(engine_pb2.ClientFrame(abort=abort))

    def keep(self, request_id: str, tokens: int, index: int, queue: UpdateQueue) -> bool:
        """Ends a request whose text ended after so many tokens, or cuts the rollout of one that has ended.

        Returns:
            Whether an update with ``kept``, or one StreamBroken, will arrive in ``queue`` together with ``index``: the
            engine may be gone, or too old to tell.
        """
        self._drop(request_id)
        if self._outgoing is None or self.model is None:
            return False
        abort = engine_pb2.AbortRequest(request_id=request_id, keep_tokens=tokens)
        self._outgoing.put_nowait(engine_pb2.ClientFrame(abort=abort))
        if self.model.tells_kept:
            self._keeping[request_id] = index, queue
        return self.model.tells_kept

    def _drop(self, request_id: str) -> bool:
        """Nobody waits for a request's tokens any more; False if it has ended."""
        known = self._requests.remove(request_id)
        if known:
            self.breaker.dropped(request_id)
        return known

    def end_requests(self, reason: str) -> None:
        """Ends all requests of this gateway there with an error: it is about to exit."""
        for sent in self._requests.take_all():
            sent.queue.put(sent.index, StreamBroken(reason, final=True))

    # -- calls

    def adapters_stub(self) -> adapters_pb2_grpc.AdaptersAsyncStub:
        """Stub for the adapters that the engine serves."""
        return adapters_pb2_grpc.AdaptersStub(self._open_channel())

    def sessions_stub(self) -> sessions_pb2_grpc.SessionsAsyncStub:
        """Stub for the engine's training sessions."""
        return sessions_pb2_grpc.SessionsStub(self._open_channel())

    def histories_stub(self) -> histories_pb2_grpc.HistoriesAsyncStub:
        """Stub for the histories that the engine keeps of clients' sessions."""
        return histories_pb2_grpc.HistoriesStub(self._open_channel())

    def engine_stub(self) -> engine_pb2_grpc.EngineAsyncStub:
        """Stub for calls beside the stream of requests."""
        return engine_pb2_grpc.EngineStub(self._open_channel())

    def unavailable(self, error: aio.AioRpcError, *, retry_after: float = 2.0) -> Unavailable:
        """The error for whoever waits for a call to this engine that has failed."""
        return Unavailable(f"engine {self.address} does not answer: {error.code().name}", retry_after=retry_after)

    # -- connection

    async def run(self) -> None:
        """Connects, and connects again with growing pauses, until cancelled."""
        pause = 0.1  # and at most 0.3: an engine that is back, or just up, should not wait for us
        try:
            while True:
                before = asyncio.get_running_loop().time()
                try:
                    await self._session()
                except* aio.AioRpcError as group:
                    if (reason := self._channels.describe(group)) != self.last_error and not self.connected:
                        log.warning("engine cannot be reached", engine=self.address, error=reason)
                    self.last_error = reason
                except* TemperError as group:
                    if (reason := self._channels.describe(group)) != self.last_error:
                        log.warning("engine refused", engine=self.address, error=reason)
                    self.last_error = reason
                except* Exception as group:
                    self.last_error = "internal error of the gateway"
                    log.exception("engine session failed", engine=self.address, exc_info=group)
                finally:
                    self._disconnected()
                if asyncio.get_running_loop().time() - before > 5.0:
                    pause = 0.1
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                pause = min(0.3, pause * 1.5)
                if self._opened_with != self._channels.fingerprint:  # the next one takes the certificates as they are
                    self._leave_channel()
        finally:
            if not self.patience:
                for closing in self._closing:
                    closing.cancel()
            self._leave_channel()
            await asyncio.gather(*self._closing, return_exceptions=True)

    def _open_channel(self) -> aio.Channel:
        if self._channel is None:
            self._opened_with = self._channels.fingerprint
            self._channel = self._channels.open(self.address)
        return self._channel

    def _leave_channel(self) -> None:
        """Closes the channel once the calls on it have ended: closed before, it would cancel whoever waits for one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            closing = asyncio.create_task(channel.close(self.patience))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _session(self) -> None:
        stub = self.engine_stub()
        model = await stub.GetModel(engine_pb2.GetModelRequest(), timeout=5)
        await self._on_model(self, model)
        self.name = model.engine
        await self._ask_status(stub)
        call = stub.Stream()
        await call.wait_for_connection()
        outgoing: asyncio.Queue[engine_pb2.ClientFrame] = asyncio.Queue()
        self._outgoing, self.away_since = outgoing, None
        self.last_error = "the connection was closed"
        log.info("engine connected", engine=self.address, model=model.name, digest=model.digest[:12])
        self._on_change()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(call, outgoing))
                tasks.create_task(self._read(call))
                tasks.create_task(self._poll(stub))
        finally:
            call.cancel()

    async def _write(
        self,
        call: aio.StreamStreamCall[engine_pb2.ClientFrame, engine_pb2.EngineFrame],
        outgoing: asyncio.Queue[engine_pb2.ClientFrame],
    ) -> None:
        while True:
            frame = await outgoing.get()
            try:
                await call.write(frame)
            except asyncio.InvalidStateError as error:
                raise Unavailable(f"engine {self.address} closed the stream") from error

    async def _read(self, call: aio.StreamStreamCall[engine_pb2.ClientFrame, engine_pb2.EngineFrame]) -> None:
        async for frame in call:
            if frame.HasField("others"):
                self._others = frame.others
            self.prefixes.heard(frame.prompts)
            failed = False
            for update in frame.updates:
                name = update.request_id
                sent = self._requests.get(name)
                if sent is None:
                    if update.kept and (awaited := self._keeping.pop(name, None)) is not None:
                        index, queue = awaited
                        queue.put(index, update)
                    continue
                if sent.predicted is not None:
                    if not update.HasField("error") and update.finish_reason not in _BROKEN_OFF:
                        self.prefixes.told(sent.predicted, update.cached_tokens)
                    sent.predicted = None
                if update.finish_reason != _RUNNING or update.HasField("error"):
                    self._requests.remove(name)
                    failed = self._judge(update) or failed
                elif not sent.begun:
                    self._requests.begin(sent)
                    self.breaker.answered(name)
                sent.queue.put(sent.index, update)
            if failed:
                # One step that fails ends all its requests: it is one failure.
                self.breaker.failed()
        raise Unavailable(f"engine {self.address} closed the stream")

    def _judge(self, update: engine_pb2.Update) -> bool:
        """Verdict on the engine by the last update of a request: True if the engine has failed."""
        if update.HasField("error"):
            if update.error.code in _FAULTS or update.error.exhausted:
                return True
            self.breaker.dropped(update.request_id)
        elif update.finish_reason == engine_pb2.FINISH_REASON_ERROR:
            return True
        else:
            self.breaker.finished(update.request_id)
        return False

    async def _ask_status(self, stub: engine_pb2_grpc.EngineAsyncStub) -> None:
        before = self._requests.load
        asked = engine_pb2.GetStatusRequest(prompts_after=self._heard)
        status = self.status = await stub.GetStatus(asked, timeout=self._stale_after)
        self.prefixes.heard(status.prompts)
        self._heard = status.prompts_seen
        status.ClearField("prompts")
        self.instance = status.instance
        self._others = self._requests.others(status, before)

    async def _poll(self, stub: engine_pb2_grpc.EngineAsyncStub) -> None:
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self._ask_status(stub)
            except aio.AioRpcError as error:
                if self.status is not None:
                    # It gets no new requests until it answers again; those it has may still be served.
                    log.warning("engine does not report its status", engine=self.address, code=error.code().name)
                    self.status = None
            self._on_change()

    def _disconnected(self) -> None:
        was_connected = self.connected
        self._outgoing = self.status = self.model = None
        orphans = self._requests.take_all()
        self._others, self._heard = engine_pb2.Load(), 0
        # Whoever comes back may be another process.
        self.prefixes.clear()
        if orphans:
            self.breaker.failed()
        for sent in orphans:
            sent.queue.put(sent.index, StreamBroken(self.last_error))
        keeping, self._keeping = self._keeping, {}
        for index, queue in keeping.values():
            queue.put(index, StreamBroken(self.last_error))
        if was_connected:
            self.away_since = asyncio.get_running_loop().time()
            log.warning("engine lost", engine=self.address, error=self.last_error, requests=len(orphans))
        self._on_change()
