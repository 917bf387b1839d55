"""Resources of /v1/train."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from services.common.adapters.registry import AdapterRegistry
from services.common.queue.job_queue import JobQueue
from services.gateway.api.base.dependencies import provided
from services.gateway.core.admission import Lifecycle
from services.gateway.core.file_store import StoreThreads
from services.gateway.engines.pool import EnginePool
from services.gateway.settings import GatewaySettings

_CHECKS = 2


@dataclass(frozen=True, slots=True)
class TrainingServices:
    """The job queue, and what a job may refer to."""

    settings: GatewaySettings
    engines: EnginePool
    queue: JobQueue
    registry: AdapterRegistry
    """Blocking, so only called in ``threads``."""
    threads: StoreThreads
    lifecycle: Lifecycle
    checks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_CHECKS))
    """Held while a training job is tokenized: the threads are shared with prompts."""


Training = Annotated[TrainingServices, provided(TrainingServices)]
