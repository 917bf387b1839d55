"""Resources of /v1/files, /v1/batches and /v1/messages/batches, and what running batches share."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Annotated, ParamSpec, TypeVar

from services.common.storage.object_store import ObjectStore
from services.gateway.api.base.dependencies import provided
from services.gateway.api.batches.internal_client import Caller
from services.gateway.core.batch_queue import BatchConsumer, BatchQueue
from services.gateway.core.file_store import FileStore, StoreThreads
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.settings import GatewaySettings

P = ParamSpec("P")
T = TypeVar("T")
_FILE_UPLOADS = 4


@dataclass(frozen=True, slots=True)
class BatchStores:
    """Where files and batches are.

    Args:
        files: in the object store; blocking.
        queue: batches, as those who submit them see them.
        consumer: as those who run them do; blocking.
    """

    files: FileStore
    queue: BatchQueue
    consumer: BatchConsumer


def open_batching(settings: GatewaySettings) -> BatchStores:
    """Files and batches in the same stores. Connects on first use."""
    consumer = BatchConsumer(
        settings,
        owner=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}",
        reclaim_seconds=settings.batch_reclaim_seconds,
        max_attempts=settings.batch_max_attempts,
    )
    return BatchStores(FileStore(ObjectStore(settings)), BatchQueue(settings), consumer)


@dataclass(frozen=True, slots=True)
class BatchServices:
    """Files and batches."""

    settings: GatewaySettings
    files: FileStore
    """Blocking, so only called in ``threads``."""
    batches: BatchQueue
    message_batches: BatchQueue
    threads: StoreThreads
    file_uploads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_FILE_UPLOADS))
    """Held while an uploaded file is written to the object store, in one of the ``threads``."""

    @classmethod
    def of(cls, settings: GatewaySettings, stores: BatchStores, threads: StoreThreads) -> BatchServices:
        """The services over these stores."""
        return cls(settings, stores.files, stores.queue, stores.queue.of("msgbatch"), threads)


Batches = Annotated[BatchServices, provided(BatchServices)]


class BatchHost:
    """What the batches that one gateway runs share.

    Args:
        settings: how many requests run at a time.
        metrics: where batches are counted.
        threads: for what blocks on the object store.
        stores: where files and batches are.
        caller: sends the requests.
        redis_threads: for what blocks on Redis.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        threads: StoreThreads,
        stores: BatchStores,
        caller: Caller,
        redis_threads: Executor,
    ) -> None:
        self.settings = settings
        self.files = stores.files
        self.consumer = stores.consumer
        self.queue = stores.queue
        self.caller = caller
        self.slots = asyncio.Semaphore(settings.batch_concurrency)
        """Requests of all batches that run here at a time."""
        self.metrics = metrics
        self._threads = threads
        self._redis_threads = redis_threads

    async def store(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a blocking call to the object store in a thread. Raises Unavailable."""
        return await self._threads.run(function, *args, **kwargs)

    async def redis(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a blocking call to Redis in a thread. Raises Unavailable."""
        return await asyncio.get_running_loop().run_in_executor(self._redis_threads, lambda: function(*args, **kwargs))
