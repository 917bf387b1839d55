"""The job queue on a real Valkey: every promise of delivery, ownership and replay."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import redis

from services.common.errors import Conflict, InvalidRequest, NotFound
from services.common.jobs import JobProgress, JobState
from services.common.queue import scripts
from services.common.queue.depth import QueueDepth
from services.common.queue.job_queue import JobConsumer, JobLost, JobQueue
from services.common.queue.keyspace import TRAINING
from services.common.queue.records import job_id_of_entry, new_job_id
from tests.integration.jobs import RECLAIM, Consumers, must_claim, read_events, sft, silence


async def test_life_of_a_job(queue: JobQueue, consumers: Consumers, raw: redis.Redis) -> None:
    job = await queue.submit(sft(checkpoint_every=7))
    assert job.state is JobState.QUEUED
    assert abs(job.created_at - time.time()) < 5
    assert job.metadata == {"by": "test"}
    consumer = consumers("a")
    claimed = must_claim(consumer)
    assert claimed.id == job.id
    assert claimed.spec == sft(checkpoint_every=7)
    assert claimed.attempt == 1
    assert consumer.claim(0) is None
    assert consumer.heartbeat(claimed) is False
    consumer.report(claimed, JobProgress(step=1, total_steps=2, eta_seconds=3.5), {"loss": 2.0, "lr": 0.1})
    consumer.report(claimed, JobProgress(step=2, total_steps=2), {"loss": 1.0, "bad": float("nan")})
    consumer.event(claimed, "checkpoint", {"step": 2})
    running = await queue.get(job.id)
    assert running.state is JobState.RUNNING
    assert running.progress.step == 2
    assert running.metrics == {"loss": 1.0, "lr": 0.1}
    consumer.succeed(claimed, "math@1")
    consumer.succeed(claimed, "math@1")  # the answer got lost and the owner repeats it
    done = await queue.get(job.id)
    assert done.state is JobState.SUCCEEDED
    assert done.result_adapter == "math@1"
    assert done.finished_at is not None
    assert done.started_at is not None
    assert done.created_at <= done.started_at <= done.finished_at
    events = await read_events(queue, job.id)
    assert [e.kind for e in events] == ["state", "state", "progress", "progress", "checkpoint", "state"]
    assert events[2].data == {"loss": 2.0, "lr": 0.1, "step": 1, "total_steps": 2, "eta_seconds": 3.5}
    assert events[-1].data == {"state": "succeeded", "result_adapter": "math@1"}
    assert raw.xlen(TRAINING.stream) == 0
    assert 0 < raw.ttl(TRAINING.events_key(job.id)) <= scripts.EVENTS_TTL
    assert raw.hget(TRAINING.job_key(job.id), "spec") is None


async def test_rows_of_a_data_set_leave_with_the_end_of_their_job(
    queue: JobQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    """Whose rows they are may be erased later. What failed of its own examples is kept for whoever asks why."""
    consumer, kept = consumers("a"), []
    for own in ({}, {"dataset": "thumbs@1", "dataset_digest": "0" * 64}):
        job = await queue.submit(sft(**own))
        consumer.fail(must_claim(consumer), "it does not work")
        assert (await queue.get(job.id)).state is JobState.FAILED
        kept.append(raw.hexists(TRAINING.job_key(job.id), "spec"))
    assert kept == [True, False]


async def test_what_an_owner_reports_again_changes_nothing(
    queue: JobQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    """Its answer got lost, or a server that was frozen carries out what has been sent again since."""
    job = await queue.submit(sft())
    before, after = consumers("a"), consumers("b")
    claimed = must_claim(before)
    for step, number in ((1, 1), (1, 1), (2, 3), (1, 1), (2, 3)):
        before.report(claimed, JobProgress(step=step, total_steps=2), {"loss": 1 / step}, number)
    for number in (2, 3, 4, 4):
        before.event(claimed, "log", {"number": number}, number)
    before.describe(claimed, {"epochs": 2}, ["new"], {}, 6)
    before.describe(claimed, {"epochs": 1}, ["old"], {}, 5)
    silence(raw)
    again = must_claim(after)
    after.event(again, "log", {"number": 1}, 1)  # another owner counts anew
    now = await queue.get(job.id)
    assert (now.progress.step, now.metrics, now.settings, now.notes) == (2, {"loss": 0.5}, {"epochs": 2}, ["new"])
    after.succeed(again, "math@1")
    events = [event for event in await read_events(queue, job.id) if event.kind != "state"]
    assert [event.data.get("step", event.data.get("number")) for event in events] == [1, 2, 4, 1]


async def test_idempotency(queue: JobQueue, raw: redis.Redis) -> None:
    first = await queue.submit(sft(), idempotency_key="k 1")
    assert (await queue.submit(sft(), idempotency_key="k 1")).id == first.id
    with pytest.raises(Conflict, match=first.id):
        await queue.submit(sft(epochs=9), idempotency_key="k 1")
    assert (await queue.submit(sft())).id != first.id
    assert raw.xlen(TRAINING.stream) == 2
    with pytest.raises(InvalidRequest):
        await queue.submit(sft(), idempotency_key="")
    many = await asyncio.gather(*(queue.submit(sft(), idempotency_key="k2") for _ in range(20)))
    assert len({job.id for job in many}) == 1


async def test_a_job_that_follows_on_another_is_submitted_once(queue: JobQueue, consumers: Consumers) -> None:
    first, again = consumers("a"), consumers("b")
    made = first.submit(sft(), idempotency_key="draft-for-job", key_id="key-1", traceparent="00-ab")
    assert again.submit(sft(), idempotency_key="draft-for-job", key_id="key-1") == made
    (job,) = await queue.list()
    assert (job.id, job.state, job.key_id) == (made, JobState.QUEUED, "key-1")
    with pytest.raises(Conflict, match=made):
        again.submit(sft(epochs=9), idempotency_key="draft-for-job", key_id="key-1")
    assert must_claim(first).id == made


async def test_a_key_stands_for_the_request_and_not_for_what_was_made_of_it(queue: JobQueue) -> None:
    assert await queue.submitted("k", "request") is None
    job = await queue.submit(sft(), idempotency_key="k", request_sha="request")
    found = await queue.submitted("k", "request")
    assert found is not None
    assert found.id == job.id
    assert (await queue.submit(sft(epochs=9), idempotency_key="k", request_sha="request")).id == job.id
    with pytest.raises(Conflict, match=job.id):
        await queue.submitted("k", "another")
    with pytest.raises(InvalidRequest):
        await queue.submitted("k" * 257, "sha")


async def test_unknown_job(queue: JobQueue) -> None:
    for call in (queue.get, queue.cancel, lambda job_id: read_events(queue, job_id)):
        with pytest.raises(NotFound):
            await call("job-none")
    with pytest.raises(NotFound):
        await queue.list(after="job-none")


async def test_list_newest_first_with_paging(queue: JobQueue, raw: redis.Redis) -> None:
    ids = [(await queue.submit(sft(f"a{n % 2}"))).id for n in range(7)]
    assert [job.id for job in await queue.list()] == ids[::-1]
    page = await queue.list(limit=3)
    assert [job.id for job in page] == ids[:3:-1]
    assert [job.id for job in await queue.list(limit=3, after=page[-1].id)] == ids[3:0:-1]
    assert [job.id for job in await queue.list(adapter="a1")] == ids[5::-2]
    await queue.cancel(ids[2])
    assert [job.id for job in await queue.list(state=JobState.CANCELLED)] == [ids[2]]
    raw.delete(TRAINING.job_key(ids[6]))  # expired
    assert len(await queue.list()) == 6
    assert raw.zcard(TRAINING.index) == 6


async def test_dead_owner_is_replaced_and_fenced_out(queue: JobQueue, consumers: Consumers, raw: redis.Redis) -> None:
    job = await queue.submit(sft())
    old, new = consumers("old"), consumers("new")
    before = must_claim(old)
    assert new.claim(0) is None
    silence(raw)
    after = must_claim(new)
    assert (after.id, after.attempt) == (job.id, 2)
    for write in (
        lambda: old.heartbeat(before),
        lambda: old.report(before, JobProgress(), {}),
        lambda: old.event(before, "log", {}),
        lambda: old.succeed(before, "math@1"),
        lambda: old.fail(before, "x"),
        lambda: old.cancelled(before),
        lambda: old.requeue(before),
        lambda: old.retry(before, "x"),
        lambda: old.resolve_parent(before, None),
    ):
        with pytest.raises(JobLost):
            write()
    new.succeed(after, "math@1")
    assert (await queue.get(job.id)).state is JobState.SUCCEEDED


async def test_two_owners_of_one_name_do_not_lose_each_others_jobs(
    queue: JobQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    """As of a pod that is replaced and still runs: what one has is there for others when it dies, though the other has
    left the group under their name."""
    job = await queue.submit(sft())
    leaving, staying = consumers("pod-0"), consumers("pod-0")
    claimed = must_claim(staying)
    leaving.close()
    staying.heartbeat(claimed)
    silence(raw)
    heir = consumers("pod-1")
    assert must_claim(heir).id == job.id
    staying.close()
    assert {consumer["name"] for consumer in raw.xinfo_consumers(TRAINING.stream, TRAINING.group)} == {"pod-1"}


async def test_heartbeats_keep_a_job(queue: JobQueue, consumers: Consumers, raw: redis.Redis) -> None:
    await queue.submit(sft())
    owner, other = consumers("owner"), consumers("other")
    claimed = must_claim(owner)
    for _ in range(5):
        silence(raw, 0.6 * RECLAIM)
        assert owner.heartbeat(claimed) is False
        assert other.claim(0) is None
    owner.succeed(claimed, "math@1")


async def test_requeue_does_not_count_and_comes_next(queue: JobQueue, consumers: Consumers) -> None:
    first = await queue.submit(sft())
    await queue.submit(sft())
    consumer = consumers("a")
    for _ in range(5):
        claimed = must_claim(consumer)
        assert (claimed.id, claimed.attempt) == (first.id, 1)
        consumer.requeue(claimed)
        consumer.requeue(claimed)  # repeated after a lost answer
        assert (await queue.get(first.id)).state is JobState.QUEUED
        with pytest.raises(JobLost):
            consumer.report(claimed, JobProgress(), {})
    assert must_claim(consumers("b")).id == first.id


async def test_cancel_while_queued(queue: JobQueue, consumers: Consumers, raw: redis.Redis) -> None:
    job = await queue.submit(sft())
    assert (await queue.cancel(job.id)).state is JobState.CANCELLED
    assert (await queue.cancel(job.id)).state is JobState.CANCELLED
    assert consumers("a").claim(0) is None
    assert raw.xlen(TRAINING.stream) == 0
    requeued = await queue.submit(sft())
    consumer = consumers("b")
    consumer.requeue(must_claim(consumer))
    assert (await queue.cancel(requeued.id)).state is JobState.CANCELLED
    assert consumer.claim(0) is None
    assert raw.xpending(TRAINING.stream, TRAINING.group)["pending"] == 0


async def test_cancel_while_running(queue: JobQueue, consumers: Consumers) -> None:
    job = await queue.submit(sft())
    consumer = consumers("a")
    claimed = must_claim(consumer)
    assert consumer.cancel_requested(claimed) is False
    asked = await queue.cancel(job.id)
    assert (asked.state, asked.cancel_requested) == (JobState.RUNNING, True)
    assert consumer.cancel_requested(claimed) is True
    assert consumer.heartbeat(claimed) is True
    consumer.cancelled(claimed)
    assert (await queue.get(job.id)).state is JobState.CANCELLED


async def test_cancelled_job_of_a_dead_owner_ends_at_reclaim(
    queue: JobQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    job = await queue.submit(sft())
    must_claim(consumers("dies"))
    await queue.cancel(job.id)
    silence(raw)
    assert consumers("b").claim(0) is None
    assert (await queue.get(job.id)).state is JobState.CANCELLED


async def test_what_is_being_published_cannot_be_cancelled(queue: JobQueue, consumers: Consumers) -> None:
    job = await queue.submit(sft())
    consumer = consumers("a")
    claimed = must_claim(consumer)
    assert consumer.publishing(claimed)
    assert consumer.publishing(claimed)
    with pytest.raises(Conflict, match="too late to cancel"):
        await queue.cancel(job.id)
    consumer.requeue(claimed)  # the engine shuts down in the middle of it
    with pytest.raises(Conflict, match="too late to cancel"):
        await queue.cancel(job.id)
    again = must_claim(consumer)
    assert consumer.heartbeat(again) is False
    consumer.succeed(again, "math@1")
    assert (await queue.cancel(job.id)).state is JobState.SUCCEEDED


async def test_a_cancellation_that_came_first_keeps_a_job_from_publishing(
    queue: JobQueue, consumers: Consumers
) -> None:
    job = await queue.submit(sft())
    consumer = consumers("a")
    claimed = must_claim(consumer)
    await queue.cancel(job.id)
    assert not consumer.publishing(claimed)


async def test_parent_is_fixed_by_the_first_attempt(queue: JobQueue, consumers: Consumers) -> None:
    await queue.submit(sft())
    consumer = consumers("a")
    claimed = must_claim(consumer)
    assert consumer.recorded_parent(claimed) == (False, None)
    assert consumer.resolve_parent(claimed, None) is None
    consumer.retry(claimed, "x")
    again = must_claim(consumer)
    assert consumer.recorded_parent(again) == (True, None)
    assert consumer.resolve_parent(again, "math@4") is None


async def test_events_are_followed_and_resumed(queue: JobQueue, consumers: Consumers) -> None:
    job = await queue.submit(sft())
    consumer = consumers("a")
    claimed = must_claim(consumer)

    def work() -> None:
        for step in range(1, 6):
            consumer.report(claimed, JobProgress(step=step, total_steps=5), {"loss": 1 / step})
            time.sleep(0.02)
        consumer.succeed(claimed, "math@1")

    thread = threading.Thread(target=work)
    thread.start()
    followed = await read_events(queue, job.id)
    thread.join()
    assert [e.data.get("step") for e in followed if e.kind == "progress"] == [1, 2, 3, 4, 5]
    middle = followed[4].id
    assert await read_events(queue, job.id, middle) == followed[5:]
    assert await read_events(queue, job.id, followed[-1].id) == []
    with pytest.raises(InvalidRequest):
        await read_events(queue, job.id, "not an id")


async def test_many_consumers_share_without_doubling(queue: JobQueue, consumers: Consumers) -> None:
    ids = {(await queue.submit(sft())).id for _ in range(30)}
    claimed: list[str] = []

    def drain(consumer: JobConsumer) -> None:
        while (job := consumer.claim(0)) is not None:
            claimed.append(job.id)
            consumer.succeed(job, "math@1")

    threads = [threading.Thread(target=drain, args=[consumers(f"c{n}")]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == sorted(ids)


def test_job_ids_sort_by_time() -> None:
    first = new_job_id()
    time.sleep(0.002)
    assert first < new_job_id()
    assert len(first) == 30
    assert job_id_of_entry("1700000000000-0") == job_id_of_entry("1700000000000-0")
    assert job_id_of_entry("1700000000000-0") != job_id_of_entry("1700000000000-1")


async def test_depth_counts_what_has_not_ended_wherever_it_is(
    queue: JobQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    assert await queue.depth() == QueueDepth(0, 0, 0, 0.0)
    for adapter in ("a", "a", "a", "b"):
        await queue.submit(sft(adapter))
    owner = consumers("one")
    first = must_claim(owner)
    assert first.spec.adapter == "a"
    second = must_claim(owner)
    assert second.spec.adapter == "b", "the other jobs of a only wait in their line from here on"
    raw.xadd(TRAINING.stream, {"spec": sft("c").model_dump_json()})
    raw.xadd(TRAINING.stream, {"spec": "{"})
    depth = await queue.depth()
    assert (depth.queued, depth.running, depth.dead) == (4, 2, 0)
    owner.adopt_waiting()
    assert (await queue.depth()).queued == 4, "a spec that became a job is still one"
    owner.requeue(first)
    depth = await queue.depth()
    assert (depth.queued, depth.running) == (5, 1)
    assert 0 <= depth.oldest_queued_seconds < 60
    owner.succeed(second, "b@1")
    owner.fail(must_claim(owner), "no")
    assert owner.claim(1) is not None
    assert owner.claim(1) is not None
    assert owner.claim(1) is None, "the entry that is no job"
    depth = await queue.depth()
    assert (depth.queued, depth.running, depth.dead) == (1, 2, 1)


async def test_the_age_is_that_of_the_oldest_that_waits(queue: JobQueue, raw: redis.Redis) -> None:
    old, _ = await queue.submit(sft("a")), await queue.submit(sft("b"))
    raw.hset(TRAINING.job_key(old.id), "created_at", str(time.time() - 1000))
    assert 990 < (await queue.depth()).oldest_queued_seconds < 1060
    await queue.cancel(old.id)
    assert (await queue.depth()).oldest_queued_seconds < 60
