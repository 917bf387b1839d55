"""Stores of files and batches, and how many batches a key may have."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from dataclasses import dataclass, field
from typing import Annotated

from services.common.errors import RateLimited
from services.common.storage.object_store import ObjectStore
from services.gateway.api.base.routing import provided
from services.gateway.core.batch_queue import BatchConsumer, BatchQueue
from services.gateway.core.file_store import FileStore, StoreThreads
from services.gateway.settings import GatewaySettings

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


async def check_unfinished(stores: BatchServices, owner: str) -> None:
    """Raises RateLimited: so many batches of an owner, of whatever kind, have not ended that there may be no more."""
    most = stores.settings.batch_max_unfinished
    if await stores.batches.unfinished(owner, most=most) >= most:
        raise RateLimited(
            f"{most} batches have not ended, which is the limit: wait for one, or cancel one", retry_after=30.0
        )
