"""Jobs on a machine that gives their engine no more memory, threads or file handles."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from services.common.adapters.registry import AdapterRegistry
from services.common.errors import scarce
from services.common.jobs import JobState
from services.common.queue.job_queue import JobQueue
from services.trainer.runtime.checkpoint import CheckpointWriter
from services.trainer.runtime.job_link import JobSession
from services.trainer.settings import TrainerSettings
from tests.integration.toy import ToyHost, make_worker
from tests.integration.worker_jobs import check_done, events_of, finished, spec, trainer_settings, until

__all__ = ["trainer_settings"]

NO_THREAD = RuntimeError("can't start new thread")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "lack", [NO_THREAD, MemoryError(), OSError(errno.EMFILE, "m")], ids=["thread", "memory", "file"]
)
async def test_what_the_machine_lacks_fails_no_job(
    lack: Exception,
    queue: JobQueue,
    registry: AdapterRegistry,
    trainer_settings: TrainerSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As often as a crash would fail it; its user reads what it waits for."""
    lacking = iter(range(trainer_settings.job_max_attempts))

    class Writer(CheckpointWriter):
        def __init__(self, *args: Any, **kw: Any) -> None:
            if next(lacking, None) is not None:
                raise lack
            super().__init__(*args, **kw)

    monkeypatch.setattr("services.trainer.runtime.attempts.training.CheckpointWriter", Writer)
    worker = make_worker(trainer_settings, ToyHost())
    worker.start()
    job = await queue.submit(spec())
    done = await finished(queue, job.id)
    await check_done(queue, registry, done, spec())
    assert done.attempts == trainer_settings.job_max_attempts + 1
    told = [event.data["message"] for event in await events_of(queue, job.id) if event.kind == "log"]
    assert (
        sum(f"this engine gets no {scarce(lack)}" in message for message in told) == trainer_settings.job_max_attempts
    )
    assert worker.drain()


async def test_a_job_that_never_gets_what_it_needs_is_given_up(
    queue: JobQueue, trainer_settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writer(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("services.trainer.runtime.attempts.training.CheckpointWriter", writer)
    monkeypatch.setattr("services.trainer.runtime.until_back._SCARCE_SECONDS", 0.01)
    worker = make_worker(trainer_settings.model_copy(update={"job_max_attempts": 2}), ToyHost())
    worker.start()
    done = await finished(queue, (await queue.submit(spec())).id)
    assert (done.state, done.attempts) == (JobState.FAILED, 20)
    assert done.reason == "given up after 20 attempts: MemoryError: "
    assert worker.drain()


async def test_a_job_that_waits_can_be_cancelled(
    queue: JobQueue, trainer_settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writer(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("services.trainer.runtime.attempts.training.CheckpointWriter", writer)
    monkeypatch.setattr("services.trainer.runtime.until_back.BACKOFF_SECONDS", (30.0, 0.1))
    worker = make_worker(trainer_settings, ToyHost())
    worker.start()
    job = await queue.submit(spec())
    await until(queue, job.id, lambda found: found.state is JobState.RUNNING)
    await queue.cancel(job.id)
    done = await finished(queue, job.id)
    assert (done.state, done.attempts) == (JobState.CANCELLED, 1), "during the first pause of a minute"
    assert worker.drain()


async def test_a_claim_without_a_thread_is_handed_back(
    queue: JobQueue, registry: AdapterRegistry, trainer_settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, lacking = JobSession.start, iter(range(4))

    def begin(self: JobSession) -> None:
        if next(lacking, None) is not None:
            raise NO_THREAD
        start(self)

    monkeypatch.setattr(JobSession, "start", begin)
    worker = make_worker(trainer_settings.model_copy(update={"job_reclaim_seconds": 60.0}), ToyHost())
    worker.start()
    done = await finished(queue, (await queue.submit(spec())).id)
    await check_done(queue, registry, done, spec())
    assert done.attempts == 1
    assert worker.drain()
