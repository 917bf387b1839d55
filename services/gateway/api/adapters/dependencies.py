"""Resources of /v1/adapters and /v1/models."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from services.common.adapters.registry import AdapterRegistry
from services.common.queue.job_queue import JobQueue
from services.gateway.api.base.dependencies import provided
from services.gateway.core.file_store import StoreThreads
from services.gateway.engines.pool import EnginePool
from services.gateway.settings import GatewaySettings

_UPLOADS = 2


@dataclass(frozen=True, slots=True)
class AdapterServices:
    """Adapters in the object store, and the engines that serve them."""

    settings: GatewaySettings
    engines: EnginePool
    registry: AdapterRegistry
    """Blocking, so only called in ``threads``."""
    queue: JobQueue
    threads: StoreThreads
    uploads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_UPLOADS))
    """Held while an upload is in memory."""


Adapters = Annotated[AdapterServices, provided(AdapterServices)]
