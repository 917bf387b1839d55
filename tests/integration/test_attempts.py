"""Attempts of jobs in the queue, on a real Valkey: which count as failures, and which is the last."""

from __future__ import annotations

import contextlib

import pytest
import redis

from services.common.jobs import JobState
from services.common.queue.job_queue import JobConsumer, JobLost, JobQueue
from services.common.queue.keyspace import TRAINING
from services.common.settings import CommonSettings
from tests.integration.jobs import RECLAIM, Consumers, must_claim, read_events, sft, silence


async def test_dead_letter_after_three_deliveries(queue: JobQueue, consumers: Consumers, raw: redis.Redis) -> None:
    job = await queue.submit(sft())
    for attempt in (1, 2, 3):
        assert must_claim(consumers(f"c{attempt}")).attempt == attempt
        silence(raw)
    assert consumers("c4").claim(0) is None
    done = await queue.get(job.id)
    assert done.state is JobState.FAILED
    assert done.reason is not None
    assert "3 attempts" in done.reason
    ((_, letter),) = raw.xrange(TRAINING.dead)
    assert letter["job"] == job.id
    assert (await read_events(queue, job.id))[-1].data["state"] == "failed"
    assert raw.xlen(TRAINING.stream) == 0


async def test_deaths_before_a_part_was_safe_do_not_count(
    queue: JobQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    """A job that comes further is never given up; one that does not is, with what its last attempts died of."""
    job = await queue.submit(sft())
    for attempt in range(1, 8):
        claimed = must_claim(consumers(f"c{attempt}"))
        assert (claimed.attempt, claimed.failures) == (attempt, 0 if attempt == 1 else 1)
        consumers("x").kept(claimed)
        consumers("x").kept(claimed)
        silence(raw)
    for failures in (1, 2):
        claimed = must_claim(consumers(f"d{failures}"))
        assert (claimed.attempt, claimed.failures) == (7 + failures, failures)
        assert consumers("x").is_last(claimed) == (failures == 2)
        if failures == 1:
            silence(raw)
    assert not consumers("d2").retry(claimed, "KeyError"), "the third attempt in a row that came to nothing"
    done = await queue.get(job.id)
    assert (done.state, done.attempts) == (JobState.FAILED, 9)
    assert done.reason == "given up after 3 attempts: KeyError"
    with pytest.raises(JobLost):
        consumers("x").kept(claimed)


async def test_no_job_brings_engines_down_for_ever(queue: JobQueue, settings: CommonSettings, raw: redis.Redis) -> None:
    job = await queue.submit(sft())
    with contextlib.closing(JobConsumer(settings, owner="one", reclaim_seconds=RECLAIM, max_attempts=3)) as consumer:
        for attempt in range(1, 31):
            claimed = must_claim(consumer)
            assert consumer.is_last(claimed) == (attempt == 30)
            consumer.kept(claimed)
            silence(raw)
        assert consumer.claim(0) is None
    done = await queue.get(job.id)
    assert done.reason == "given up after 30 attempts: its engine died or stopped answering each time"


async def test_unexpected_errors_end_in_the_dead_letter_stream(
    queue: JobQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    job = await queue.submit(sft())
    consumer = consumers("a")
    for attempt in (1, 2, 3):
        claimed = must_claim(consumer)
        assert claimed.attempt == attempt
        consumer.retry(claimed, f"KeyError: {attempt}")
    done = await queue.get(job.id)
    assert done.state is JobState.FAILED
    assert done.reason == "given up after 3 attempts: KeyError: 3"
    assert raw.xlen(TRAINING.dead) == 1
