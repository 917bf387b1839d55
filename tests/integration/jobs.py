"""Jobs for tests of the queue."""

from __future__ import annotations

from collections.abc import Callable

from services.common.jobs import JobEvent, SftExample, SftJob
from services.common.queue.job_queue import ClaimedJob, JobConsumer, JobQueue

RECLAIM = 0.3
"""Seconds after which the consumers of tests take over the job of an owner that is silent."""
Consumers = Callable[..., JobConsumer]
"""Makes the consumer of an owner, which takes over after RECLAIM or `reclaim` seconds."""


def sft(adapter: str = "math", **kw: object) -> SftJob:
    return SftJob.model_validate(
        {"adapter": adapter, "examples": [SftExample(prompt="1+1", completion="2")], "metadata": {"by": "test"}, **kw}
    )


async def read_events(queue: JobQueue, job_id: str, after: str | None = None) -> list[JobEvent]:
    return [event async for event in queue.events(job_id, after)]


def must_claim(consumer: JobConsumer) -> ClaimedJob:
    claimed = consumer.claim(1)
    assert claimed is not None
    return claimed
