"""A trainer that does other work besides jobs: with real Redis and S3, and a job's pauses."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.adapters.registry import AdapterRegistry
from services.common.jobs import JobState, SftJob
from services.common.queue.job_queue import JobQueue
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.trainer.runtime import worker as worker_module
from services.trainer.runtime.worker import TrainerWorker
from services.trainer.settings import TrainerSettings
from tests.integration.servers import RunningServer
from tests.integration.toy import ToyHost, prepare

RECLAIM = 1.5


class Side:
    """Pieces of work that a test hands in."""

    def __init__(self) -> None:
        self.pieces: list[Callable[[], None]] = []
        self.wake: Callable[[], None] = lambda: None
        self.threads: set[str] = set()
        self.swept = 0

    def bind(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def add(self, piece: Callable[[], None]) -> None:
        self.pieces.append(piece)
        self.wake()

    @property
    def ready(self) -> bool:
        return bool(self.pieces)

    def run_next(self) -> bool:
        if not self.pieces:
            return False
        self.threads.add(threading.current_thread().name)
        self.pieces.pop(0)()
        return True

    def sweep(self) -> None:
        self.swept += 1


def worker_of(settings: CommonSettings, tmp_path: Path, side: Side) -> TrainerWorker:
    trainer = TrainerSettings(
        **settings.model_dump(),
        job_reclaim_seconds=RECLAIM,
        job_heartbeat_seconds=0.2,
        checkpoint_dir=tmp_path / "checkpoints",
        trainer_drain_seconds=10,
    )
    store = ObjectStore(trainer)
    registry = AdapterRegistry(store, trainer.served_model_name)
    return TrainerWorker(
        ToyHost(),  # type: ignore[arg-type]
        trainer,
        store=store,
        registry=registry,
        prepare=prepare,
        side=side,
    )


def spec(**metadata: str) -> SftJob:
    return SftJob.model_validate(
        {"adapter": "math", "examples": [{"prompt": "1+1", "completion": "2"}], "metadata": metadata}
    )


async def ended(queue: JobQueue, job_id: str) -> JobState:
    async for _ in queue.events(job_id):
        pass
    return (await queue.get(job_id)).state


def done(side: Side) -> None:
    """A piece of work has been done."""
    told = threading.Event()
    side.add(told.set)
    assert told.wait(60)


@pytest.mark.usefixtures("valkey", "store")
def test_an_idle_trainer_is_woken_at_once(
    settings: CommonSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_IDLE_SECONDS", 600.0)
    side = Side()
    worker = worker_of(settings, tmp_path, side)
    worker.start()
    for _ in range(3):
        done(side)
    assert side.threads == {"trainer"}
    monkeypatch.setattr(worker_module, "_IDLE_SECONDS", 0.05)
    done(side)
    deadline = time.monotonic() + 60
    while not side.swept:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert worker.drain()


async def test_side_work_runs_in_the_pauses_of_a_job(
    valkey: RunningServer, store: ObjectStore, settings: CommonSettings, tmp_path: Path
) -> None:
    side, queue = Side(), JobQueue(settings)
    worker = worker_of(settings, tmp_path, side)
    worker.start()
    job = await queue.submit(spec(sleep="3.0", steps="6"))
    deadline = time.monotonic() + 20
    while (await queue.get(job.id)).progress.total_steps == 0:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    for _ in range(8):
        await asyncio.to_thread(done, side)
    assert (await queue.get(job.id)).state == JobState.RUNNING, "a piece waits for a tenth of a step, not for a step"
    await queue.cancel(job.id)
    assert await ended(queue, job.id) == JobState.CANCELLED
    assert side.threads == {"trainer"}
    assert worker.drain()
    await queue.aclose()


async def test_a_claimed_job_outlives_long_side_work(
    valkey: RunningServer, store: ObjectStore, settings: CommonSettings, tmp_path: Path
) -> None:
    side, queue = Side(), JobQueue(settings)
    workers = [worker_of(settings, tmp_path, side), worker_of(settings, tmp_path, Side())]
    workers[0].start()
    go_on = threading.Event()
    side.add(lambda: go_on.wait(30) and None)
    job = await queue.submit(spec(steps="3"))
    deadline = time.monotonic() + 20
    while (await queue.get(job.id)).state != JobState.RUNNING:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    workers[1].start()  # which would take it over, if its owner were silent
    await asyncio.sleep(2 * RECLAIM)
    go_on.set()
    assert await ended(queue, job.id) == JobState.SUCCEEDED
    assert (await queue.get(job.id)).attempts == 1
    assert all(worker.drain() for worker in workers)
    await queue.aclose()


async def test_a_job_claimed_while_the_trainer_drains_is_handed_back(
    valkey: RunningServer, store: ObjectStore, settings: CommonSettings, tmp_path: Path
) -> None:
    side, queue = Side(), JobQueue(settings)
    worker = worker_of(settings, tmp_path, side)
    worker.start()
    go_on = threading.Event()
    side.add(lambda: go_on.wait(30) and None)
    job = await queue.submit(spec(steps="3"))
    deadline = time.monotonic() + 20
    while (await queue.get(job.id)).state != JobState.RUNNING:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    draining = threading.Thread(target=worker.drain)
    draining.start()
    await asyncio.sleep(0.3)
    go_on.set()
    await asyncio.to_thread(draining.join, 20)
    assert not worker.alive
    assert (await queue.get(job.id)).state == JobState.QUEUED
    successor = worker_of(settings, tmp_path, Side())
    successor.start()
    assert await ended(queue, job.id) == JobState.SUCCEEDED
    assert successor.drain()
    await queue.aclose()


async def test_a_trainer_that_died_says_so_and_loses_its_job_to_another(
    valkey: RunningServer, store: ObjectStore, settings: CommonSettings, tmp_path: Path
) -> None:
    """Its process would otherwise keep the job for ever, and take further ones."""
    side, queue = Side(), JobQueue(settings)
    workers = [worker_of(settings, tmp_path, side), worker_of(settings, tmp_path, Side())]
    workers[0].start()
    go_on = threading.Event()

    def settle() -> None:
        if go_on.is_set():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    workers[0]._host.memory_budget.settle = settle  # type: ignore[method-assign]
    side.add(lambda: go_on.wait(30) and None)
    job = await queue.submit(spec(steps="3"))
    deadline = time.monotonic() + 20
    while (await queue.get(job.id)).state != JobState.RUNNING:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    assert workers[0].alive
    go_on.set()
    await asyncio.to_thread(workers[0]._thread.join, 20)
    assert not workers[0].alive
    workers[1].start()
    assert await ended(queue, job.id) == JobState.SUCCEEDED
    assert (await queue.get(job.id)).attempts == 2
    assert workers[1].drain()
    assert workers[0].drain()
    await queue.aclose()
