"""What the handlers of one gateway share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, ParamSpec, TypeVar

from fastapi import Depends, Request

from services.common.adapters.registry import AdapterRegistry
from services.common.errors import Unavailable
from services.common.queue.job_queue import JobQueue
from services.common.security.api_keys import ANONYMOUS
from services.common.telemetry.tracing import NO_TRACER, Tracer
from services.gateway.api.base.idempotency import Idempotency, RedisRecords
from services.gateway.api.batches.dependencies import BatchStores
from services.gateway.api.health.queue_gauges import QueueWatch
from services.gateway.api.responses.background import BackgroundResponses
from services.gateway.api.responses.store.best_effort import Shelf
from services.gateway.api.responses.store.documents import DocumentStore
from services.gateway.api.responses.store.store import ResponseStore
from services.gateway.auth.ownership import owner
from services.gateway.core.admission import Admission
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.engines.conversation_sessions import HistoryRouter
from services.gateway.engines.pool import EnginePool
from services.gateway.engines.training_sessions import SessionRouter
from services.gateway.settings import GatewaySettings

P = ParamSpec("P")
T = TypeVar("T")

_STORE_THREADS = 8
_STORE_CALLS = 64
_UPLOADS = 2
_FILE_UPLOADS = 4
_CHECKS = 2


class Gateway:
    """Built once, by the application's lifespan.

    Args:
        settings: everything that can be set.
        engines: not started yet.
        registry: adapters in the object store; blocking, so only called through ``store``.
        queue: training jobs.
        metrics: all series.
        responses: where responses of /v1/responses are kept.
        documents: where stored chats and conversations are.
        batching: files and batches.
        tracer: gets spans of completions.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        engines: EnginePool,
        registry: AdapterRegistry,
        queue: JobQueue,
        metrics: GatewayMetrics,
        responses: ResponseStore,
        documents: DocumentStore,
        batching: BatchStores,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.settings = settings
        self.tracer = tracer
        self.engines = engines
        self.registry = registry
        self.queue = queue
        self.metrics = metrics
        self.files = batching.files
        """Blocking, so only called through ``store``."""
        self.batches = batching.queue
        self.message_batches = batching.queue.of("msgbatch")
        self.queues = QueueWatch({"training": queue, "batches": batching.queue}, metrics)
        self.responses = responses
        self.documents = documents
        self.shelf = Shelf(responses)
        self.sessions = SessionRouter(lambda: engines.clients, settings.engine_retry_seconds)
        """Training sessions, each in one of the engines."""
        self.histories = HistoryRouter(engines, settings.request_timeout_seconds)
        """Clients' sessions, as engines keep them."""
        self.admission = Admission(settings.max_in_flight)
        self.idempotency = Idempotency(RedisRecords(settings))
        """Answers to requests with an Idempotency-Key."""
        self.stopping = asyncio.Event()
        """Set by SIGTERM: readiness is off and batches are handed back. New requests are still answered."""
        self.closing = asyncio.Event()
        """Set when no connection is accepted any more: followers of job events are sent home."""
        self.background = BackgroundResponses(responses, settings, self.closing)
        # Threads of their own: while the store hangs, tokenizing must not wait behind it.
        self._threads = ThreadPoolExecutor(_STORE_THREADS, "store")
        self._store_calls = 0
        self.uploads = asyncio.Semaphore(_UPLOADS)
        """Held while an upload is in memory."""
        self.file_uploads = asyncio.Semaphore(_FILE_UPLOADS)
        """Held while an uploaded file is written to the object store, in a thread of ``store``."""
        self.checks = asyncio.Semaphore(_CHECKS)
        """Held while a training job is tokenized: the threads are shared with prompts."""

    def count_tokens(self, kind: str, tokens: int) -> None:
        """Counts tokens of the caller that this task works for.

        Args:
            kind: "prompt", "cached" or "completion".
        """
        self.metrics.tokens.labels(kind).inc(tokens)
        if self.settings.metrics_by_key:
            self.metrics.key_tokens.labels(owner() or ANONYMOUS, kind).inc(tokens)

    async def store(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a blocking call to the object store in a thread.

        Raises:
            Unavailable: too many calls wait for the store already, or what the call raises.
        """
        if self._store_calls >= _STORE_CALLS:
            raise Unavailable("too many requests wait for the object store", retry_after=5.0)
        self._store_calls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        finally:
            self._store_calls -= 1

    def close(self) -> None:
        """Lets the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves a request.

    Raises:
        RuntimeError: the application was not started.
    """
    found = request.app.state.gateway
    if not isinstance(found, Gateway):
        raise RuntimeError("the application was not started: its lifespan builds the gateway")
    return found


async def _gateway_of(request: Request) -> Gateway:
    # A coroutine because FastAPI runs what is none in a thread, which would cost two changes of threads.
    return gateway_of(request)


GatewayDep = Annotated[Gateway, Depends(_gateway_of)]
"""For routes that run seldom; those of completions call ``gateway_of``, which is 0.06 ms less of FastAPI's."""
