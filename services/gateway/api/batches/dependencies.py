"""What the batches of one gateway share."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from services.common.storage.object_store import ObjectStore
from services.gateway.api.batches.internal_client import Caller
from services.gateway.core.batch_queue import BatchConsumer, BatchQueue
from services.gateway.core.file_store import FileStore
from services.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from services.gateway.context import Gateway

P = ParamSpec("P")
T = TypeVar("T")


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


class BatchHost:
    """A gateway as its batches see it.

    Args:
        threads: for what blocks on Redis.
    """

    def __init__(self, gateway: Gateway, stores: BatchStores, caller: Caller, threads: Executor) -> None:
        self.settings: GatewaySettings = gateway.settings
        self.files = stores.files
        self.consumer = stores.consumer
        self.queue = stores.queue
        self.caller = caller
        self.slots = asyncio.Semaphore(gateway.settings.batch_concurrency)
        """Requests of all batches that run here at a time."""
        self.metrics = gateway.metrics
        self._gateway = gateway
        self._threads = threads

    async def store(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a blocking call to the object store in a thread. Raises Unavailable."""
        return await self._gateway.store(function, *args, **kwargs)

    async def redis(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a blocking call to Redis in a thread. Raises Unavailable."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
