"""Paused jobs: out of the queue until they are resumed, and then exactly where they were. On a real Valkey."""

from __future__ import annotations

import pytest
import redis

from services.common.adapters.registry import AdapterRegistry
from services.common.errors import Conflict
from services.common.jobs import JobState
from services.common.queue.job_queue import JobQueue
from services.common.storage.object_store import ObjectStore
from services.trainer.runtime.worker import TrainerWorker
from tests.integration.jobs import Consumers, must_claim, read_events, sft, silence
from tests.integration.worker_jobs import check_done, finished, spec, trainer_settings, until, worker

__all__ = ["trainer_settings", "worker"]


async def test_a_paused_job_holds_back_those_of_its_adapter_only(queue: JobQueue, consumers: Consumers) -> None:
    first, behind = [await queue.submit(sft()) for _ in range(2)]
    other = await queue.submit(sft("other"))
    assert (await queue.pause(first.id)).paused
    assert (await queue.pause(first.id)).state is JobState.QUEUED
    consumer = consumers("a")
    claimed = must_claim(consumer)
    assert claimed.id == other.id, "the paused one is not given out, and the one behind it waits"
    assert consumer.claim(0) is None
    depth = await queue.depth()
    assert (depth.queued, depth.running) == (0, 1), "nothing waits for an engine"
    consumer.succeed(claimed, "other@1")
    resumed = await queue.resume(first.id)
    assert (resumed.state, resumed.paused) == (JobState.QUEUED, False)
    await queue.resume(first.id)
    claimed = must_claim(consumer)
    assert (claimed.id, claimed.attempt) == (first.id, 1)
    await queue.pause(behind.id)
    consumer.succeed(claimed, "math@1")
    assert consumer.claim(0) is None, "the end of another job does not end its pause"
    assert (await queue.cancel(behind.id)).state is JobState.CANCELLED
    for steer in (queue.pause, queue.resume):
        with pytest.raises(Conflict, match="has ended"):
            await steer(behind.id)


async def test_a_running_job_pauses_at_its_hand_back_even_if_its_owner_dies(
    queue: JobQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    job = await queue.submit(sft())
    consumer = consumers("a")
    claimed = must_claim(consumer)
    assert (await queue.pause(job.id)).state is JobState.RUNNING
    assert consumer.asked(claimed) == "PAUSE"
    await queue.resume(job.id)
    assert consumer.asked(claimed) == "OK", "withdrawn before its owner had heard"
    await queue.pause(job.id)
    consumer.requeue(claimed, "paused")
    paused = await queue.get(job.id)
    assert (paused.state, paused.paused, paused.attempts) == (JobState.QUEUED, True, 0)
    assert consumer.claim(0) is None
    await queue.resume(job.id)
    must_claim(consumer)
    await queue.pause(job.id)
    silence(raw)  # it dies
    assert consumers("b").claim(0) is None
    assert (await queue.get(job.id)).paused
    await queue.resume(job.id)
    again = must_claim(consumers("b"))
    assert consumers("b").publishing(again)
    with pytest.raises(Conflict, match="publishing"):
        await queue.pause(job.id)


async def test_a_paused_job_frees_the_engine_and_goes_on_where_it_was(
    queue: JobQueue, registry: AdapterRegistry, worker: TrainerWorker, store: ObjectStore
) -> None:
    wanted = spec(sleep=0.1, steps=20, every=100)
    job = await queue.submit(wanted)
    await until(queue, job.id, lambda j: j.progress.step >= 3)
    await queue.pause(job.id)
    paused = await until(queue, job.id, lambda j: j.state is JobState.QUEUED)
    assert len(store.list(f"jobs/{job.id}/")) == 3, "its checkpoint"
    other = await finished(queue, (await queue.submit(spec("other", attach=False))).id)
    assert other.state is JobState.SUCCEEDED
    assert (await queue.get(job.id)).progress == paused.progress
    await queue.resume(job.id)
    done = await finished(queue, job.id)
    await check_done(queue, registry, done, wanted)
    assert done.attempts == 1
    logs = [event.data.get("message") for event in await read_events(queue, job.id)]
    assert f"resumed after step {paused.progress.step} of 20" in logs
