"""Paused jobs: out of the queue until they are resumed, and then exactly where they were. On a real Valkey."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import WEIGHTS, AdapterRegistry
from services.common.errors import Conflict
from services.common.jobs import JobState
from services.common.queue.job_queue import JobQueue
from services.common.storage.object_store import ObjectStore
from services.trainer.runtime.worker import TrainerWorker
from tests.integration.jobs import Consumers, must_claim, read_events, sft, silence
from tests.integration.servers import RunningServer
from tests.integration.toy import expected
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
    made = registry.manifest(AdapterVersion("math", 1))
    assert made.metrics.keys() == registry.manifest(AdapterVersion("other", 1)).metrics.keys(), "the job's own metrics"


async def test_what_a_step_has_made_when_it_is_paused_is_not_made_again(
    queue: JobQueue, registry: AdapterRegistry, worker: TrainerWorker, store: ObjectStore, tmp_path: Path
) -> None:
    """Though there is a checkpoint behind the step before: a round of rollouts may have taken minutes."""
    made = tmp_path / "made"
    wanted = spec(sleep=0.5, steps=4, every=1, metadata={"made": str(made)})
    job = await queue.submit(wanted)
    for step in (0, 2):
        await until(queue, job.id, lambda j, step=step: j.progress.step >= step and made.exists())  # type: ignore[misc]
        await queue.pause(job.id)
        await until(queue, job.id, lambda j: j.state is JobState.QUEUED)
        assert any("-begun/" in key for key in store.list(f"jobs/{job.id}/"))
        await queue.resume(job.id)
    done = await finished(queue, job.id)
    assert made.read_text().split() == ["0", "1", "2", "3"]
    await check_done(queue, registry, done, wanted)
    events = [event for event in await read_events(queue, job.id) if event.kind == "progress"]
    assert [event.data["made_at"] for event in events if "made_at" in event.data] == [0.0, 1.0, 2.0, 3.0]


async def test_an_epoch_whose_version_could_not_be_published_is_not_trained_again(
    queue: JobQueue, registry: AdapterRegistry, worker: TrainerWorker, s3: RunningServer
) -> None:
    """Paused while the store is away, the job has its checkpoint on the disk, and publishes when it goes on."""
    job = await queue.submit(spec(sleep=0.3, steps=6, every=100, epochs=3, epoch_versions=2))
    await until(queue, job.id, lambda j: j.progress.step >= 1)
    with s3.down():
        async for event in queue.events(job.id):
            if str(event.data.get("message")).startswith("waiting: "):
                break
        await queue.pause(job.id)
        paused = await until(queue, job.id, lambda j: j.state is JobState.QUEUED)
    assert paused.progress.step in (2, 4)
    await queue.resume(job.id)
    assert (await finished(queue, job.id)).state is JobState.SUCCEEDED
    made = registry.versions("math")
    assert [one.step for one in made] == [2, 4, None]
    for one in made[:2]:
        assert registry.files(one.ref)[WEIGHTS] == expected(spec(steps=one.step or 0))[0]
    logs = [event.data.get("message") for event in await read_events(queue, job.id)]
    assert f"resumed after step {paused.progress.step} of 6" in logs


async def test_a_step_that_needs_what_is_away_keeps_those_before_it(
    queue: JobQueue, registry: AdapterRegistry, worker: TrainerWorker, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    away.touch()
    wanted = spec(every=100, metadata={"away": str(away)})
    done = await finished(queue, (await queue.submit(wanted)).id)
    await check_done(queue, registry, done, wanted)
    assert done.attempts == 2
    logs = [event.data.get("message") for event in await read_events(queue, done.id)]
    assert "resumed after step 5 of 12" in logs


async def test_a_job_that_ends_without_an_owner_leaves_nothing_behind(
    queue: JobQueue, worker: TrainerWorker, consumers: Consumers, raw: redis.Redis, store: ObjectStore
) -> None:
    """Its owner died, and it was cancelled before anybody else had it."""
    busy = await queue.submit(spec("other", sleep=0.2, steps=100))
    await until(queue, busy.id, lambda j: j.state is JobState.RUNNING)
    job = await queue.submit(spec())
    must_claim(consumers("dies"))
    left = [
        f"jobs/{job.id}/checkpoints/00000001-00000003/state.json",
        f"adapters/math/training-hashes/{job.id}/grams-0",
    ]
    for key in left:
        store.put(key, b"{}")
    await queue.cancel(job.id)
    silence(raw)
    await queue.cancel(busy.id)
    assert (await finished(queue, job.id)).state is JobState.CANCELLED
    await until(queue, job.id, lambda _: not {*left} & {*store.list("jobs/"), *store.list("adapters/")})
