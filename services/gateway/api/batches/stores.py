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
    """Stores of files and batches.

    Args:
        files: files, in the object store; blocking.
        queue: batches, for those who submit them.
        consumer: batches, for those who run them; blocking.
    """

    files: FileStore
    queue: BatchQueue
    consumer: BatchConsumer


def open_batching(settings: GatewaySettings) -> BatchStores:
    """Opens the stores of files and batches, which connect on first use."""
    consumer = BatchConsumer(
        settings,
        owner=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}",
        reclaim_seconds=settings.batch_reclaim_seconds,
        max_attempts=settings.batch_max_attempts,
    )
    return BatchStores(FileStore(ObjectStore(settings)), BatchQueue(settings), consumer)


@dataclass(frozen=True, slots=True)
class BatchServices:
    """Stores of files and batches, as routes use them."""

    settings: GatewaySettings
    files: FileStore
    """Store of files. It blocks, so it is only called in ``threads``."""
    batches: BatchQueue
    message_batches: BatchQueue
    threads: StoreThreads
    file_uploads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_FILE_UPLOADS))
    """Semaphore held while an uploaded file is written to the object store, in one of the ``threads``."""

    @classmethod
    def of(cls, settings: GatewaySettings, stores: BatchStores, threads: StoreThreads) -> BatchServices:
        """The services over these stores."""
        return cls(settings, stores.files, stores.queue, stores.queue.of("msgbatch"), threads)


Batches = Annotated[BatchServices, provided(BatchServices)]


async def check_unfinished(stores: BatchServices, owner: str) -> None:
    """Checks that an owner may have another batch. Raises RateLimited: too many, of all kinds, have not ended."""
    most = stores.settings.batch_max_unfinished
    if await stores.batches.unfinished(owner, most=most) >= most:
        raise RateLimited(
            f"{most} batches have not ended, which is the limit: wait for one, or cancel one", retry_after=30.0
        )
