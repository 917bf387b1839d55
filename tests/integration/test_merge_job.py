"""Merges as jobs, and retention after a publish, with real Redis and S3."""

from __future__ import annotations

import asyncio

import pytest
import redis
import torch

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import WEIGHTS, AdapterRegistry
from services.common.jobs import JobState, MergeJob
from services.common.queue.consumer import JobConsumer
from services.common.queue.job_queue import JobQueue
from services.common.queue.keyspace import TRAINING
from services.common.queue.records import spec_json
from services.common.settings import CommonSettings
from services.trainer.runtime.worker import TrainerWorker
from services.trainer.settings import TrainerSettings
from tests.integration.test_registry import files
from tests.integration.toy import BASE_DIGEST, SIZE, ToyHost, make_worker
from tests.integration.worker_jobs import (
    Spawn,
    events_of,
    finished,
    spawn,
    spec,
    trainer_settings,
    until,
    worker,
)

__all__ = ["spawn", "trainer_settings", "worker"]


def merge(*sources: tuple[str, float], **fields: object) -> MergeJob:
    parents = [{"adapter": ref, "weight": weight} for ref, weight in sources]
    return MergeJob.model_validate({"adapter": "merged", "sources": parents, **fields})


def publish(registry: AdapterRegistry, name: str, value: float, base_digest: str = BASE_DIGEST) -> AdapterVersion:
    parts = {**files(), WEIGHTS: torch.full((SIZE,), value).numpy().tobytes()}
    return registry.publish(name, parts, base_digest=base_digest).ref


def weights(registry: AdapterRegistry, version: AdapterVersion) -> torch.Tensor:
    return torch.frombuffer(bytearray(registry.files(version)[WEIGHTS]), dtype=torch.float32)


async def test_a_merge_becomes_a_version_with_its_lineage(
    queue: JobQueue, registry: AdapterRegistry, worker: TrainerWorker
) -> None:
    publish(registry, "a", 1.0)
    publish(registry, "a", 100.0)
    b = publish(registry, "b", 3.0)
    done = await finished(queue, (await queue.submit(merge(("a@1", 0.5), ("b", -2.0)))).id)
    assert (done.state, done.result_adapter, done.kind) == (JobState.SUCCEEDED, "merged@1", "merge"), done.reason
    version = AdapterVersion("merged", 1)
    assert torch.equal(weights(registry, version), torch.full((SIZE,), 0.5 - 6.0))
    manifest = registry.manifest(version)
    assert manifest.parent is None
    assert manifest.lineage is not None
    digests = [registry.manifest(AdapterVersion("a", 1)).digest, registry.manifest(b).digest]
    assert [(p.version, p.weight, p.digest) for p in manifest.lineage.parents] == [
        ("a@1", 0.5, digests[0]),
        ("b@1", -2.0, digests[1]),
    ]
    assert registry.attached() is None, "a merge is attached on request only"
    done = await finished(queue, (await queue.submit(merge(("merged", 2.0), attach=True))).id)
    assert registry.attached() == AdapterVersion("merged", 2)
    assert registry.manifest(AdapterVersion("merged", 2)).lineage.parents[0].version == "merged@1"  # type: ignore[union-attr]


async def test_merges_that_cannot_be(queue: JobQueue, registry: AdapterRegistry, worker: TrainerWorker) -> None:
    publish(registry, "a", 1.0)
    publish(registry, "alien", 1.0, base_digest="c" * 64)
    for sources, words in (
        ([("a@1", 1.0), ("nobody", 1.0)], "nobody"),
        ([("a@2", 1.0)], "a@2"),
        ([("a@1", 1.0), ("alien", 1.0)], "alien@1: it belongs to base model"),
        ([("a@1", 1.0), ("a", 1.0)], "a@1 is among the sources more than once"),
    ):
        done = await finished(queue, (await queue.submit(merge(*sources))).id)
        assert (done.state, done.attempts) == (JobState.FAILED, 1)
        assert words in (done.reason or "")
    assert registry.names() == ["a", "alien"]


async def test_sources_are_decided_once(queue: JobQueue, registry: AdapterRegistry, spawn: Spawn) -> None:
    """A second attempt merges what the first one began with, although another version is current by then."""
    publish(registry, "a", 1.0)
    publish(registry, "b", 5.0)
    job = await queue.submit(merge(("a", 1.0), ("b", 1.0), metadata={"sleep": "1.5"}))
    process = spawn()
    await until(queue, job.id, lambda j: j.progress.step >= 1)
    process.kill()
    process.wait()
    publish(registry, "a", 100.0)
    spawn()
    done = await finished(queue, job.id)
    assert (done.state, done.attempts) == (JobState.SUCCEEDED, 2), done.reason
    assert torch.equal(weights(registry, AdapterVersion("merged", 1)), torch.full((SIZE,), 6.0))


async def test_a_spec_straight_from_redis(
    queue: JobQueue, registry: AdapterRegistry, worker: TrainerWorker, settings: CommonSettings
) -> None:
    publish(registry, "a", 1.0)
    with redis.Redis.from_url(settings.redis_url.get_secret_value()) as raw:
        raw.xadd(TRAINING.stream, {"spec": spec_json(merge(("a", 1.0)))})
        bad = merge(("a", 1.0)).model_dump(mode="json") | {"method": "ties"}
        raw.xadd(TRAINING.stream, {"spec": MergeJob.model_construct(**bad).model_dump_json(warnings=False)})
        for _ in range(200):
            if registry.versions("merged") and raw.xlen(TRAINING.dead):
                break
            await asyncio.sleep(0.05)
        reason = raw.xrange(TRAINING.dead)[0][1][b"reason"].decode()
    assert "method ties needs a rank" in reason
    assert [m.version for m in registry.versions("merged")] == [1]


@pytest.fixture
def tidy_settings(trainer_settings: TrainerSettings) -> TrainerSettings:
    return trainer_settings.model_copy(update={"adapter_versions_kept": 2})


async def test_old_versions_go_after_a_publish(
    queue: JobQueue, registry: AdapterRegistry, tidy_settings: TrainerSettings
) -> None:
    worker = make_worker(tidy_settings, ToyHost())
    worker.start()
    jobs = [(await queue.submit(spec(attach=number == 1))).id for number in range(1, 6)]
    done = [await finished(queue, job) for job in jobs]
    assert [job.result_adapter for job in done] == [f"math@{number}" for number in range(1, 6)]
    assert await asyncio.to_thread(worker.drain)
    kept = [manifest.version for manifest in registry.versions("math")]
    assert kept == [1, 4, 5], "the attached one and the newest two"
    assert registry.attached() == AdapterVersion("math", 1)
    messages = [event.data.get("message", "") for event in await events_of(queue, jobs[-1])]
    assert "removed by retention: math@3" in messages


async def test_versions_that_waiting_jobs_need_stay(
    queue: JobQueue, registry: AdapterRegistry, tidy_settings: TrainerSettings, settings: CommonSettings
) -> None:
    for _ in range(4):
        publish(registry, "math", 1.0)
    publish(registry, "a", 1.0)
    waiting = await queue.submit(spec("other", start_from="math@1"))
    merging = await queue.submit(merge(("math@2", 1.0), ("a", 1.0)))
    needed = {AdapterVersion("math", 1), AdapterVersion("math", 2)}
    assert await queue.versions_needed() == needed
    consumer = JobConsumer(settings, owner="someone", reclaim_seconds=60)
    assert consumer.versions_needed() == needed
    claimed = consumer.claim(1)
    assert claimed is not None
    consumer.resolve_parent(claimed, "math@1,math@3")
    assert await queue.versions_needed() == {*needed, AdapterVersion("math", 3)}
    consumer.requeue(claimed)
    await queue.cancel(waiting.id)
    assert await queue.versions_needed() == {AdapterVersion("math", 2)}
    blocked = await queue.submit(spec("third", start_from="math@1", sleep=0.2, steps=5))
    worker = make_worker(tidy_settings, ToyHost())
    worker.start()
    for job in (merging, blocked):
        assert (await finished(queue, job.id)).state is JobState.SUCCEEDED
    await finished(queue, (await queue.submit(spec())).id)
    assert await asyncio.to_thread(worker.drain)
    assert [manifest.version for manifest in registry.versions("math")] == [4, 5], "nobody needs them any more"
