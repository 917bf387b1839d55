"""Trainers beside the tiny model's engine in this process, on real servers: what tests of their jobs share."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from services.common.adapters.registry import AdapterRegistry
from services.common.jobs import Job, JobEvent
from services.common.queue.job_queue import JobQueue
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.trainer.jobs import prepare_run
from services.trainer.runtime.attempts.forge import Forge
from services.trainer.runtime.worker import TrainerWorker
from services.trainer.settings import TrainerSettings
from tests.rollout_support import Pod, running_pod

Start = Callable[..., TrainerWorker]
"""Starts another trainer; takes changes of its host."""


@pytest.fixture
def pod(registry: AdapterRegistry) -> Iterator[Pod]:
    with running_pod(registry=registry) as pod:
        yield pod
        pod.settle()


@pytest.fixture
def start(
    settings: CommonSettings,
    store: ObjectStore,
    registry: AdapterRegistry,
    pod: Pod,
    tmp_path: Path,
    trainer_fields: Mapping[str, Any],
    forge: Forge | None,
) -> Iterator[Start]:
    trainer = TrainerSettings(
        **settings.model_dump(),
        job_heartbeat_seconds=0.2,
        checkpoint_dir=tmp_path / "checkpoints",
        **trainer_fields,
    )
    workers: list[TrainerWorker] = []

    def make(**host: Any) -> TrainerWorker:
        beside = dataclasses.replace(pod.host, **host)
        workers.append(TrainerWorker(beside, trainer, store=store, registry=registry, prepare=prepare_run, forge=forge))
        workers[-1].start()
        return workers[-1]

    yield make
    for worker in workers:
        worker.drain()


async def until(queue: JobQueue, job_id: str, condition: Callable[[Job], bool], timeout: float = 180) -> Job:
    deadline = time.monotonic() + timeout
    while not condition(job := await queue.get(job_id)):
        assert time.monotonic() < deadline, job
        await asyncio.sleep(0.02)
    return job


async def events(queue: JobQueue, job_id: str) -> list[JobEvent]:
    return [event async for event in queue.events(job_id)]
