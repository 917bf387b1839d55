"""Turns in the job queue on a real Valkey: jobs of one adapter one after another, others beside."""

from __future__ import annotations

import redis

from services.common.jobs import DpoJob, JobState
from services.common.queue.job_queue import JobQueue
from services.common.queue.keyspace import TRAINING
from tests.integration.jobs import Consumers, must_claim, sft, silence


async def test_jobs_of_one_adapter_run_one_after_another(
    queue: JobQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    jobs = [await queue.submit(sft()) for _ in range(4)]
    other = await queue.submit(sft("other"))
    first, second = consumers("a"), consumers("b")
    running = must_claim(first)
    assert running.id == jobs[0].id
    beside = must_claim(second)  # the second to fourth wait, the other adapter's does not
    assert beside.id == other.id
    assert second.claim(0) is None
    assert (await queue.get(jobs[1].id)).state is JobState.QUEUED
    late = await queue.submit(sft())
    assert second.claim(0) is None
    first.requeue(running)  # its turn is not over
    running = must_claim(second)
    assert running.id == jobs[0].id
    assert (await queue.cancel(jobs[2].id)).state is JobState.CANCELLED
    second.fail(running, "broken")
    for expected in (jobs[1], jobs[3], late):
        claimed = must_claim(first)
        assert (claimed.id, claimed.attempt) == (expected.id, 1)
        assert second.claim(0) is None
        first.succeed(claimed, "math@1")
    second.succeed(beside, "other@1")
    assert first.claim(0) is None
    assert raw.keys("temper:line:*") == []
    assert raw.xlen(TRAINING.stream) == 0


async def test_a_line_goes_on_behind_a_dead_owner_and_a_lost_job(
    queue: JobQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    first, lost, last = [await queue.submit(sft()) for _ in range(3)]
    must_claim(consumers("dies"))
    consumer = consumers("b")
    assert consumer.claim(0) is None
    raw.delete(TRAINING.job_key(lost.id))
    silence(raw)
    again = must_claim(consumer)
    assert (again.id, again.attempt) == (first.id, 2)
    consumer.succeed(again, "math@1")
    assert must_claim(consumer).id == last.id


async def test_an_owner_that_has_jobs_takes_only_what_it_can_run_beside_them(
    queue: JobQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    consumer, other = consumers("a"), consumers("b")
    assert consumer.claim_beside({"sft"}) is None, "there is no queue yet"
    first, second = [await queue.submit(sft(name)) for name in ("one", "two")]
    again = await queue.submit(sft("one"))
    pairs = [{"prompt": "1+1", "chosen": "2", "rejected": "3"}]
    dpo = await queue.submit(DpoJob.model_validate({"adapter": "three", "examples": pairs}))
    last = await queue.submit(sft("four"))
    assert must_claim(consumer).id == first.id
    beside = consumer.claim_beside({"sft"})
    assert beside is not None
    assert beside.id == second.id
    assert consumer.claim_beside({"sft"}) is None, "the next of its adapter waits, and behind it is one of another kind"
    assert (await queue.get(again.id)).state is JobState.QUEUED
    consumer.requeue(beside, "no room")
    taken = consumer.claim_beside({"sft"})
    assert taken is not None
    assert taken.id == second.id, "what was handed back comes first"
    assert must_claim(other).id == dpo.id
    raw.xadd(TRAINING.stream, {"spec": sft("five").model_dump_json()})
    found = [consumer.claim_beside({"sft"}) for _ in range(3)]
    assert [one.spec.adapter if one else None for one in found] == ["four", "five", None]
    assert found[0] is not None
    assert found[0].id == last.id
    raw.xadd(TRAINING.stream, {"spec": "no JSON"})
    assert consumer.claim_beside({"sft"}) is None
