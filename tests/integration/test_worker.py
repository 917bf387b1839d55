"""The life of a training job with real Redis, real S3 and real deaths."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import WEIGHTS, AdapterRegistry
from services.common.adapters.retention import RetentionPolicy, prune
from services.common.errors import Conflict
from services.common.evaluation.contamination.overlap import SuiteOverlap
from services.common.evaluation.contamination.store import TrainingHashes
from services.common.evaluation.suites.spec import SuiteItem
from services.common.jobs import JobState, SftJob
from services.common.queue.job_queue import JobQueue
from services.common.queue.keyspace import TRAINING
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.trainer.runtime.worker import TrainerWorker
from services.trainer.settings import TrainerSettings
from tests.integration.servers import RunningServer
from tests.integration.toy import ToyHost, expected, make_worker
from tests.integration.worker_jobs import (
    Spawn,
    check_done,
    events_of,
    finished,
    loss_curve,
    spawn,
    spec,
    trainer_settings,
    until,
    worker,
)

__all__ = ["spawn", "trainer_settings", "worker"]


async def test_a_job_from_submit_to_attached(
    queue: JobQueue, registry: AdapterRegistry, trainer_settings: TrainerSettings, store: ObjectStore
) -> None:
    host = ToyHost()
    worker = make_worker(trainer_settings, host)
    worker.start()
    job = await queue.submit(spec())
    done = await finished(queue, job.id)
    await check_done(queue, registry, done, spec())
    assert done.progress.step == done.progress.total_steps == 12
    assert host.synced == [AdapterVersion("math", 1)]
    events = await events_of(queue, job.id)
    assert {"state", "progress", "log", "published"} <= {event.kind for event in events}
    assert events[-1].data["state"] == "succeeded"
    manifest = registry.manifest(AdapterVersion("math", 1))
    assert (manifest.job_id, manifest.parent, manifest.base_digest) == (job.id, None, host.base_digest)
    assert manifest.metrics["loss"] == pytest.approx(done.metrics["loss"])
    assert done.metrics["loss_after"] == pytest.approx(done.metrics["loss"])
    assert manifest.metrics["loss_after"] == pytest.approx(done.metrics["loss"])
    assert done.metrics["loss_before"] > done.metrics["loss_after"]
    assert worker.drain()
    assert not worker.alive
    assert store.list(f"jobs/{job.id}/") == []


async def test_training_continues_from_versions(
    queue: JobQueue, registry: AdapterRegistry, worker: TrainerWorker
) -> None:
    async def run(wanted: SftJob) -> AdapterVersion:
        done = await finished(queue, (await queue.submit(wanted)).id)
        assert done.state is JobState.SUCCEEDED, done.reason
        return registry.current(wanted.adapter)

    first = await run(spec(attach=False))
    assert registry.attached() is None
    second = await run(spec())
    assert registry.manifest(second).parent == "math@1"
    assert registry.files(second)[WEIGHTS] == expected(spec(), registry.files(first))[0]
    fresh = await run(spec(start_from="base"))
    assert registry.files(fresh)[WEIGHTS] == registry.files(first)[WEIGHTS]
    other = await run(spec("other", start_from="math@2"))
    assert registry.manifest(other).parent == "math@2"
    newest = await run(spec("newest", start_from="math"))
    assert registry.manifest(newest).parent == "math@3"


async def test_versions_keep_hashes_of_all_that_they_came_of(
    queue: JobQueue, worker: TrainerWorker, registry: AdapterRegistry
) -> None:
    for prompt in ("1+1", "2+2"):
        job = await queue.submit(spec(examples=[{"prompt": prompt, "completion": "2"}]))
        assert (await finished(queue, job.id)).state is JobState.SUCCEEDED
    suite = [SuiteItem.model_validate({"id": text, "prompt": text, "expected": "2"}) for text in ("1+1", "2+2", "3+3")]
    hashes = TrainingHashes(registry)
    lineage = hashes.lineage(AdapterVersion("math", 2))
    prompts = hashes.read(lineage.sources, "prompts")
    assert [one.exact for one in SuiteOverlap(suite).find(prompts, ())] == [True, True, False]
    assert lineage.unknown == ()


async def test_a_job_says_what_it_did_and_what_it_hardly_learnt(queue: JobQueue, worker: TrainerWorker) -> None:
    new = await finished(queue, (await queue.submit(spec())).id)
    assert new.parent is None
    assert new.settings == {"learning_rate": 0.05, "steps": 12, "epochs": 1}
    assert new.notes == ["toy data"]

    again = await finished(queue, (await queue.submit(spec(steps=1))).id)
    assert again.parent == "math@1"
    data, continues, hardly = again.notes
    assert data == "toy data"
    assert continues.startswith("goes on from math@1, the current version of math; ")
    before, after = again.metrics["loss_before"], again.metrics["loss_after"]
    assert hardly == (
        f"hardly learnt: the loss on its own examples was {before:.4g} before and is {after:.4g} after 1 steps at "
        "learning rate 0.05; leave epochs out, for the default here is epochs 3; it is attached all the same "
        "(`temper adapters detach`)"
    )
    told = [event.data["message"] for event in await events_of(queue, again.id) if event.data.get("note")]
    assert told == again.notes

    for start_from in ("base", "math@1"):
        named = await finished(queue, (await queue.submit(spec(start_from=start_from))).id)
        assert not [note for note in named.notes if note.startswith("goes on from")]


async def test_what_cannot_succeed_fails_at_once(
    queue: JobQueue, registry: AdapterRegistry, worker: TrainerWorker
) -> None:
    refused = await finished(queue, (await queue.submit(spec(metadata={"refuse": "example 3 is too long"}))).id)
    assert (refused.state, refused.reason, refused.attempts) == (JobState.FAILED, "example 3 is too long", 1)
    missing = await finished(queue, (await queue.submit(spec(start_from="nobody"))).id)
    assert missing.state is JobState.FAILED
    assert "nobody" in (missing.reason or "")
    registry.publish("alien", {WEIGHTS: b"x", "adapter_config.json": b"{}"}, base_digest="c" * 64)
    alien = await finished(queue, (await queue.submit(spec("alien"))).id)
    assert alien.state is JobState.FAILED
    assert "base model" in (alien.reason or "")
    assert registry.names() == ["alien"]


async def test_a_kernel_that_does_not_fit_fails_its_job_at_once(queue: JobQueue, worker: TrainerWorker) -> None:
    pytest.importorskip("triton")
    large = await finished(queue, (await queue.submit(spec(metadata={"does_not_fit": "3"}))).id)
    assert (large.state, large.attempts) == (JobState.FAILED, 1)
    assert "asks for 180,000 of shared memory" in (large.reason or "")
    assert (await finished(queue, (await queue.submit(spec())).id)).state is JobState.SUCCEEDED


async def test_a_bug_is_retried_and_then_dead(
    queue: JobQueue, registry: AdapterRegistry, worker: TrainerWorker, store: ObjectStore
) -> None:
    done = await finished(queue, (await queue.submit(spec(metadata={"fail": "5"}))).id)
    assert (done.state, done.attempts) == (JobState.FAILED, 3)
    assert done.reason is not None
    assert "bug at this step" in done.reason
    assert registry.names() == []
    assert (await finished(queue, (await queue.submit(spec())).id)).state is JobState.SUCCEEDED
    assert store.list(f"jobs/{done.id}/") == [], "nobody goes on from its checkpoints"


async def test_cancel_while_running(
    queue: JobQueue, registry: AdapterRegistry, worker: TrainerWorker, store: ObjectStore
) -> None:
    # With a version of an epoch, whose training stays known.
    job = await queue.submit(spec(sleep=0.2, steps=200, every=1, epochs=17, epoch_versions=16))
    await until(queue, job.id, lambda j: j.progress.step >= 12)
    await queue.cancel(job.id)
    done = await finished(queue, job.id)
    assert done.state is JobState.CANCELLED
    assert done.progress.step < 100, "long before its end"
    assert registry.names() == []
    await until(queue, job.id, lambda _: worker.current_job is None)
    assert store.list(f"jobs/{job.id}/") == []
    epoch, *_ = registry.versions("math")
    assert (epoch.step, epoch.job_id) == (11, job.id)
    lineage = TrainingHashes(registry).lineage(epoch.ref)
    assert [one.job_id for one in lineage.sources] == [job.id]
    assert lineage.unknown == ()


async def test_two_workers_take_turns_on_one_adapter(
    queue: JobQueue, registry: AdapterRegistry, trainer_settings: TrainerSettings
) -> None:
    workers = [make_worker(trainer_settings, ToyHost()) for _ in range(2)]
    for one in workers:
        one.start()
    jobs = [await queue.submit(spec(sleep=0.02)) for _ in range(4)]
    done = [await finished(queue, job.id) for job in jobs]
    assert [job.result_adapter for job in done] == [f"math@{n}" for n in range(1, 5)]
    assert [m.parent for m in registry.versions("math")] == [None, "math@1", "math@2", "math@3"]
    assert all(one.drain() for one in workers)


async def test_a_cancel_during_the_publish_is_refused_and_the_job_succeeds(
    queue: JobQueue,
    registry: AdapterRegistry,
    worker: TrainerWorker,
    trainer_settings: TrainerSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_pointer, go_on = threading.Event(), threading.Event()
    advance = AdapterRegistry.advance

    def slow_advance(self: AdapterRegistry, version: AdapterVersion) -> None:
        at_pointer.set()  # the manifest is written: the version exists
        if not go_on.wait(20):
            raise TimeoutError
        advance(self, version)

    monkeypatch.setattr(AdapterRegistry, "advance", slow_advance)
    job = await queue.submit(spec())
    assert await asyncio.to_thread(at_pointer.wait, 20)
    with pytest.raises(Conflict, match="too late"):
        await queue.cancel(job.id)
    go_on.set()
    done = await finished(queue, job.id)
    assert (done.state, done.result_adapter) == (JobState.SUCCEEDED, "math@1")


async def test_drain_checkpoints_and_hands_back(
    queue: JobQueue, registry: AdapterRegistry, trainer_settings: TrainerSettings, store: ObjectStore
) -> None:
    wanted = spec(sleep=0.1, steps=20, every=100)
    job = await queue.submit(wanted)
    first = make_worker(trainer_settings, ToyHost())
    first.start()
    await until(queue, job.id, lambda j: j.progress.step >= 5)
    assert await asyncio.to_thread(first.drain)
    waiting = await queue.get(job.id)
    assert (waiting.state, waiting.attempts) == (JobState.QUEUED, 0)
    assert len(store.list(f"jobs/{job.id}/")) == 3, "one checkpoint of three files"
    second = make_worker(trainer_settings, ToyHost())
    second.start()
    done = await finished(queue, job.id)
    await asyncio.to_thread(second.drain)
    assert done.attempts == 1
    await check_done(queue, registry, done, wanted)
    logs = [event.data.get("message", "") for event in await events_of(queue, job.id)]
    assert any("resumed after step" in message for message in logs)


async def test_kill_nine_in_the_middle(
    queue: JobQueue, registry: AdapterRegistry, spawn: Spawn, raw: redis.Redis
) -> None:
    """Three times, where two deaths in a row would be the end: each time the job has come further, for good."""
    wanted = spec(sleep=0.1, steps=18, every=4, epochs=6, epoch_versions=3)
    job = await queue.submit(wanted)
    for deaths in range(3):
        process = spawn(TEMPER_JOB_MAX_ATTEMPTS="2")
        safe = str(deaths)
        await until(queue, job.id, lambda _, safe=safe: raw.hget(TRAINING.job_key(job.id), "forgiven") == safe)  # type: ignore[misc]
        process.kill()
        process.wait()
    spawn(TEMPER_JOB_MAX_ATTEMPTS="2")
    done = await finished(queue, job.id)
    assert done.attempts == 4
    await check_done(queue, registry, done, wanted, version=4)
    made = registry.versions("math")
    assert [(one.step, one.job_id, one.parent) for one in made] == [(n, job.id, None) for n in (9, 12, 15, None)]
    for one in made[:3]:
        assert one.step is not None
        assert registry.files(one.ref)[WEIGHTS] == expected(spec(steps=one.step))[0], "once, the weights of that step"
        assert one.metrics["loss"] == pytest.approx((await loss_curve(queue, job.id))[one.step - 1])
    pruned = prune(registry, "math", RetentionPolicy(keep=1, days=None))
    assert [one.version for one in pruned.removed] == [3, 2, 1]
    assert registry.store.list("adapters/math/jobs/") == [f"adapters/math/jobs/{job.id}"]
    resumed = [e.data["message"] for e in await events_of(queue, job.id) if "resumed" in e.data.get("message", "")]
    assert resumed
    assert "after step 0 " not in resumed[0]


async def test_kill_nine_between_publish_and_the_end(
    queue: JobQueue, registry: AdapterRegistry, spawn: Spawn, tmp_path: Path
) -> None:
    wanted = spec()
    job = await queue.submit(wanted)
    marker = str(tmp_path / "crashed")
    process = spawn(TEMPER_TOY_CRASH_MARKER=marker)
    assert await asyncio.to_thread(process.wait, 30) == -signal.SIGKILL
    assert len(registry.versions("math")) == 1
    assert (await queue.get(job.id)).state is JobState.RUNNING
    spawn(TEMPER_TOY_CRASH_MARKER=marker)
    await check_done(queue, registry, await finished(queue, job.id), wanted)


async def test_a_frozen_owner_is_fenced_out(queue: JobQueue, registry: AdapterRegistry, spawn: Spawn) -> None:
    wanted = spec(sleep=0.1, steps=20, every=4)
    job = await queue.submit(wanted)
    frozen = spawn()
    await until(queue, job.id, lambda j: j.progress.step >= 6)
    frozen.send_signal(signal.SIGSTOP)
    spawn()
    await until(queue, job.id, lambda j: j.attempts == 2)
    frozen.send_signal(signal.SIGCONT)  # both run now, one of them owns
    done = await finished(queue, job.id)
    await check_done(queue, registry, done, wanted)
    await asyncio.sleep(1.0)
    assert len(registry.versions("math")) == 1


@contextlib.contextmanager
def outage(server: RunningServer, how: str) -> Iterator[None]:
    with server.frozen() if how == "frozen" else server.down():
        yield


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_redis_away_in_the_middle(
    how: str,
    queue: JobQueue,
    registry: AdapterRegistry,
    trainer_settings: TrainerSettings,
    valkey: RunningServer,
) -> None:
    """Training goes on meanwhile, and what it reported arrives."""
    patient = trainer_settings.model_copy(update={"job_reclaim_seconds": 30.0})
    worker = make_worker(patient, ToyHost())
    worker.start()
    wanted = spec(sleep=0.1, steps=30, every=5)
    job = await queue.submit(wanted)
    await until(queue, job.id, lambda j: j.progress.step >= 5)
    with outage(valkey, how):
        await asyncio.sleep(5)
    done = await finished(queue, job.id)
    assert done.attempts == 1
    await asyncio.to_thread(worker.drain)
    await check_done(queue, registry, done, wanted)
    reports = [event.data for event in await events_of(queue, job.id) if event.kind == "progress"]
    steps = [report["step"] for report in reports if "loss" in report]
    assert steps == list(range(1, 31)), "a report whose answer is lost is sent again, and written once"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_s3_away_until_after_the_last_step(
    how: str, queue: JobQueue, registry: AdapterRegistry, trainer_settings: TrainerSettings, s3: RunningServer
) -> None:
    """Checkpoints wait on the disk, the publish waits for the store, and a drain in between loses nothing."""
    first = make_worker(trainer_settings, ToyHost())
    first.start()
    wanted = spec(sleep=0.1, steps=12, every=5)
    job = await queue.submit(wanted)
    await until(queue, job.id, lambda j: j.progress.step >= 3)
    with outage(s3, how):

        def kept() -> list[Path]:
            return list(trainer_settings.checkpoint_dir.glob("*/*-00000012/manifest.json"))

        waiting = await until(queue, job.id, lambda j: j.progress.step == 12 and bool(kept()))
        assert waiting.state is JobState.RUNNING
        assert await asyncio.to_thread(first.drain)
        assert (await queue.get(job.id)).state is JobState.QUEUED
        assert kept()
    second = make_worker(trainer_settings, ToyHost())
    second.start()
    done = await finished(queue, job.id)
    await asyncio.to_thread(second.drain)
    await check_done(queue, registry, done, wanted)
    where = [event.data["where"] for event in await events_of(queue, job.id) if event.kind == "checkpoint"]
    assert "disk" in where
    assert not list(trainer_settings.checkpoint_dir.glob("*/*"))


async def test_one_poisonous_job_does_not_stop_the_queue(
    queue: JobQueue, worker: TrainerWorker, settings: CommonSettings
) -> None:
    with redis.Redis.from_url(settings.redis_url.get_secret_value()) as raw:
        raw.xadd(TRAINING.stream, {"spec": "not json"})
        done = await finished(queue, (await queue.submit(spec())).id)
        assert done.state is JobState.SUCCEEDED
        assert raw.xlen(TRAINING.dead) == 1
