"""Services that routes of evaluations use."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from services.common.adapters.registry import AdapterRegistry
from services.common.evaluation.runs.store import EvaluationStore
from services.common.evaluation.suites.store import SuiteStore
from services.common.queue.job_queue import JobQueue
from services.gateway.api.base.routing import provided
from services.gateway.core.file_store import StoreThreads
from services.gateway.engines.pool import EnginePool
from services.learning.datasets.store import DatasetStore

_CHECKS = 2


@dataclass(frozen=True, slots=True)
class EvaluationServices:
    """Suites and runs in the object store, and the queue that runs wait in."""

    suites: SuiteStore
    """Store of suites. It blocks, as those of runs and of adapters do, so they are only called in ``threads``."""
    runs: EvaluationStore
    registry: AdapterRegistry
    engines: EnginePool
    queue: JobQueue
    datasets: DatasetStore
    threads: StoreThreads
    checks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_CHECKS))
    """Semaphore held while the lines of a suite are checked, because the threads are shared with prompts."""


Evaluation = Annotated[EvaluationServices, provided(EvaluationServices)]
