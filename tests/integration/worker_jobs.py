"""Jobs, workers and the oracle of a done job, for the tests of whole training jobs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import WEIGHTS, AdapterRegistry
from services.common.jobs import Job, JobEvent, JobState, SftJob
from services.common.queue.job_queue import JobQueue
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.trainer.runtime.worker import TrainerWorker
from services.trainer.settings import TrainerSettings
from tests.forked import ForkedProcess, toy_worker
from tests.integration.toy import ToyHost, expected, make_worker

RECLAIM = 1.5


def spec(adapter: str = "math", *, sleep: float = 0.0, steps: int = 12, every: int = 3, **kw: object) -> SftJob:
    metadata = {"sleep": str(sleep), "steps": str(steps)} | dict(kw.pop("metadata", {}))  # type: ignore[call-overload]
    examples = [{"prompt": "1+1", "completion": "2"}]
    return SftJob.model_validate(
        {"adapter": adapter, "examples": examples, "checkpoint_every": every, "metadata": metadata, **kw}
    )


@pytest.fixture
def trainer_settings(settings: CommonSettings, store: ObjectStore, tmp_path: Path) -> TrainerSettings:
    return TrainerSettings(
        **settings.model_dump(),
        job_reclaim_seconds=RECLAIM,
        job_heartbeat_seconds=0.2,
        checkpoint_dir=tmp_path / "checkpoints",
        trainer_drain_seconds=10,
        adapter_sync_seconds=5,
    )


@pytest.fixture
def worker(trainer_settings: TrainerSettings) -> Iterator[TrainerWorker]:
    worker = make_worker(trainer_settings, ToyHost())
    worker.start()
    yield worker
    worker.drain()


Spawn = Callable[..., ForkedProcess]


@pytest.fixture
def spawn(trainer_settings: TrainerSettings, tmp_path: Path) -> Iterator[Spawn]:
    """Starts a worker process on the same stores."""
    processes: list[ForkedProcess] = []
    env = {
        "TEMPER_REDIS_URL": trainer_settings.redis_url.get_secret_value(),
        "TEMPER_S3_ENDPOINT": trainer_settings.s3_endpoint,
        "TEMPER_S3_BUCKET": trainer_settings.s3_bucket,
        "TEMPER_JOB_RECLAIM_SECONDS": str(RECLAIM),
        "TEMPER_JOB_HEARTBEAT_SECONDS": "0.2",
        "TEMPER_CHECKPOINT_DIR": str(trainer_settings.checkpoint_dir),
    }

    def start(work: Callable[[], None] = toy_worker, **more: str) -> ForkedProcess:
        processes.append(ForkedProcess(work, environment={**os.environ, **env, **more}, log=tmp_path / "worker.log"))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()


async def until(queue: JobQueue, job_id: str, condition: Callable[[Job], bool], timeout: float = 120) -> Job:
    deadline = time.monotonic() + timeout
    while True:
        job = await queue.get(job_id)
        if condition(job):
            return job
        assert time.monotonic() < deadline, job
        await asyncio.sleep(0.05)


async def finished(queue: JobQueue, job_id: str, timeout: float = 120) -> Job:
    return await until(queue, job_id, lambda job: job.state.terminal, timeout)


async def events_of(queue: JobQueue, job_id: str) -> list[JobEvent]:
    return [event async for event in queue.events(job_id)]


async def loss_curve(queue: JobQueue, job_id: str) -> list[float]:
    """The loss of each step, the last word for steps that were run twice."""
    losses: dict[int, float] = {}
    for event in await events_of(queue, job_id):
        if event.kind == "progress" and "loss" in event.data:
            step = int(event.data["step"])
            assert losses.setdefault(step, event.data["loss"]) == pytest.approx(event.data["loss"], rel=1e-9)
    assert sorted(losses) == list(range(1, len(losses) + 1))
    return [losses[step] for step in sorted(losses)]


async def check_done(queue: JobQueue, registry: AdapterRegistry, job: Job, wanted: SftJob, version: int = 1) -> None:
    """One version, bitwise that of an undisturbed run, current and attached; nothing left behind."""
    weights, losses = expected(wanted)
    assert job.state is JobState.SUCCEEDED
    assert job.result_adapter == f"{wanted.adapter}@{version}"
    assert [m.version for m in registry.versions(wanted.adapter)] == list(range(1, version + 1))
    ref = AdapterVersion(wanted.adapter, version)
    assert registry.files(ref)[WEIGHTS] == weights
    assert registry.current(wanted.adapter) == ref == registry.attached()
    assert await loss_curve(queue, job.id) == pytest.approx(losses, rel=1e-9)
