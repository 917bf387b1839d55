"""Jobs for tests of the queue."""

from __future__ import annotations

from collections.abc import Callable

import redis

from services.common.jobs import JobEvent, SftExample, SftJob
from services.common.queue.job_queue import ClaimedJob, JobConsumer, JobQueue
from services.common.queue.keyspace import TRAINING, Keyspace

RECLAIM = 60.0
"""Seconds after which the consumers of tests take over the job of an owner that is silent."""
Consumers = Callable[[str], JobConsumer]
"""Makes the consumer of an owner."""


def sft(adapter: str = "math", **kw: object) -> SftJob:
    return SftJob.model_validate(
        {"adapter": adapter, "examples": [SftExample(prompt="1+1", completion="2")], "metadata": {"by": "test"}, **kw}
    )


async def read_events(queue: JobQueue, job_id: str, after: str | None = None) -> list[JobEvent]:
    return [event async for event in queue.events(job_id, after)]


def silence(raw: redis.Redis, seconds: float = RECLAIM, keyspace: Keyspace = TRAINING) -> None:
    """Makes the owners of what was claimed silent for so much longer; nobody waits for it."""
    for entry in raw.xpending_range(keyspace.stream, keyspace.group, "-", "+", 100):
        idle = entry["time_since_delivered"] + int(seconds * 1000)
        # Delivered to whoever has it, and not once more.
        raw.xclaim(keyspace.stream, keyspace.group, entry["consumer"], 0, [entry["message_id"]], idle=idle, justid=True)


def must_claim(consumer: JobConsumer) -> ClaimedJob:
    claimed = consumer.claim(1)
    assert claimed is not None
    return claimed
