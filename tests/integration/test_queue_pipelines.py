"""What pipelines and other releases wrote into the job queue, on a real Valkey."""

from __future__ import annotations

import json

import pytest
import redis

from services.common.jobs import GrpoJob, JobState
from services.common.queue.job_queue import JobQueue
from services.common.queue.keyspace import TRAINING
from services.common.queue.records import job_id_of_entry, spec_json
from tests.integration.jobs import Consumers, must_claim, sft


async def test_specs_straight_from_a_pipeline(queue: JobQueue, consumers: Consumers, raw: redis.Redis) -> None:
    text = '{"kind":"grpo","adapter":"math","prompt":"1+1=","completions":["2","3"],"rewards":[1,0]}'
    entry = raw.xadd(TRAINING.stream, {"spec": text, "idempotency_key": "ci-1"})
    raw.xadd(TRAINING.stream, {"spec": text, "idempotency_key": "ci-1"})
    consumer = consumers("a")
    claimed = must_claim(consumer)
    assert isinstance(claimed.spec, GrpoJob)
    assert claimed.id == job_id_of_entry(str(entry))
    assert consumer.claim(0) is None, "the same key is the same job"
    assert (await queue.submit(claimed.spec, idempotency_key="ci-1")).id == claimed.id
    consumer.succeed(claimed, "math@1")
    assert (await queue.get(claimed.id)).state is JobState.SUCCEEDED
    assert [job.id for job in await queue.list()] == [claimed.id]
    assert raw.xlen(TRAINING.stream) == 0


async def test_pipeline_specs_are_seen_while_they_wait(queue: JobQueue, consumers: Consumers, raw: redis.Redis) -> None:
    entry = str(raw.xadd(TRAINING.stream, {"spec": sft("ci").model_dump_json(), "idempotency_key": "ci-2"}))
    raw.xadd(TRAINING.stream, {"spec": "broken"})
    consumer = consumers("busy")
    for _ in range(2):
        consumer.adopt_waiting()
        (waiting,) = await queue.list()
        assert (waiting.id, waiting.state) == (job_id_of_entry(entry), JobState.QUEUED)
    assert raw.xlen(TRAINING.dead) == 0
    claimed = must_claim(consumer)
    assert claimed.id == waiting.id
    consumer.succeed(claimed, "ci@1")
    raw.xadd(TRAINING.stream, {"spec": sft("ci").model_dump_json()})
    consumer.adopt_waiting()
    (again, _) = await queue.list()
    assert (await queue.cancel(again.id)).state is JobState.CANCELLED
    assert consumer.claim(0) is None
    assert raw.xlen(TRAINING.stream) == 0
    assert raw.xlen(TRAINING.dead) == 1
    raw.flushall()
    consumer.forget_dead_consumers()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"spec": "{"}, "invalid spec: Invalid JSON"),
        ({"nothing": "here"}, "the fields nothing and needs spec"),
        ({"spec": '{"kind":"sft","adapter":"../x","examples":[]}'}, "adapter"),
        ({"spec": '{"kind":"sft","adapter":"x","examples":[{"prompt":"a","completion":"b"}],"typo":1}'}, "typo"),
    ],
)
async def test_invalid_specs_end_in_the_dead_letter_stream(
    fields: dict[str, str], reason: str, consumers: Consumers, raw: redis.Redis
) -> None:
    entry = raw.xadd(TRAINING.stream, fields)  # type: ignore[arg-type]
    assert consumers("a").claim(0) is None
    ((_, letter),) = raw.xrange(TRAINING.dead)
    assert letter["entry"] == entry
    assert reason in letter["reason"]
    assert letter.get("spec", "") == fields.get("spec", "")
    assert raw.xlen(TRAINING.stream) == 0


async def test_an_entry_that_is_not_text_stops_nobody(queue: JobQueue, consumers: Consumers, raw: redis.Redis) -> None:
    spec = sft("x").model_dump_json().encode()
    raw.xadd(TRAINING.stream, {"spec": spec.replace(b"1+1", b"\xff")})
    raw.xadd(TRAINING.stream, {b"\xfe": b"\xff"})
    job = await queue.submit(sft())
    consumer = consumers("a")
    consumer.adopt_waiting()
    assert must_claim(consumer).id == job.id
    assert [letter["reason"][:20] for _, letter in raw.xrange(TRAINING.dead)] == [
        "invalid spec: Invali",
        "the entry has the fi",
    ]


async def test_rows_of_a_data_set_are_known_whoever_queued_them(
    queue: JobQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    """An erasure ends the jobs that have rows of a data set, and finds them by what their records say."""
    spec = sft(dataset="thumbs@1", dataset_digest="d" * 64)
    raw.xadd(TRAINING.stream, {"spec": spec.model_dump_json()})
    consumers("a").adopt_waiting()
    sent = await queue.submit(spec)
    found = {job.id: (job.dataset, job.dataset_digest) for job in await queue.unfinished()}
    assert len(found) == 2
    assert set(found.values()) == {("thumbs@1", "d" * 64)} == {(sent.dataset, sent.dataset_digest)}


async def test_key_reused_by_a_pipeline_with_another_spec(
    queue: JobQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    await queue.submit(sft(), idempotency_key="k")
    raw.xadd(TRAINING.stream, {"spec": sft(epochs=9).model_dump_json(), "idempotency_key": "k"})
    consumer = consumers("a")
    must_claim(consumer)
    assert consumer.claim(0) is None
    ((_, letter),) = raw.xrange(TRAINING.dead)
    assert "another spec" in letter["reason"]


async def test_duplicate_entry_of_a_job_is_dropped(queue: JobQueue, consumers: Consumers, raw: redis.Redis) -> None:
    job = await queue.submit(sft())
    raw.xadd(TRAINING.stream, {"job": job.id})
    consumer = consumers("a")
    assert must_claim(consumer).id == job.id
    assert consumer.claim(0) is None
    assert raw.xlen(TRAINING.stream) == 1


async def test_an_old_spec_that_no_longer_parses_fails_the_job(
    queue: JobQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    job = await queue.submit(sft())
    raw.hset(TRAINING.job_key(job.id), "spec", json.dumps({**json.loads(spec_json(sft())), "epochs": 0}))
    assert consumers("a").claim(0) is None
    done = await queue.get(job.id)
    assert done.state is JobState.FAILED
    assert done.reason is not None
    assert "this release" in done.reason
