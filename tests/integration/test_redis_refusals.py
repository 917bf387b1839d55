"""Redis that is there and refuses: full, without a disk, no primary any more, busy with a script, forbidden."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import redis

from services.common.errors import Unavailable
from services.common.jobs import JobProgress, JobState
from services.common.queue.job_queue import JobQueue
from services.common.settings import CommonSettings
from services.common.storage.redis import call, connect
from tests.chaos.refusals import REFUSALS, demoted
from tests.integration.jobs import Consumers, must_claim, read_events, sft


@pytest.mark.parametrize("code", REFUSALS)
async def test_what_redis_refuses_is_told_as_its_absence_and_nothing_is_lost(
    code: str, queue: JobQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    """Whoever submits is told to come again, whoever trains repeats what it says: as while Redis is away."""
    job = await queue.submit(sft())
    consumer = consumers("a")
    claimed = must_claim(consumer)
    writes: list[Callable[[], None]] = [
        lambda: consumer.report(claimed, JobProgress(step=1, total_steps=1), {"loss": 1.0}, 1),
        lambda: consumer.succeed(claimed, "math@1"),
    ]
    with REFUSALS[code](raw):
        tries = [queue.submit(sft("other"), idempotency_key="k"), *(asyncio.to_thread(write) for write in writes)]
        for outcome in await asyncio.gather(*tries, return_exceptions=True):
            assert isinstance(outcome, Unavailable), outcome
            assert f"(TEMPER_REDIS_URL) refuses: {code}" in outcome.message
        if code in ("BUSY", "MASTERDOWN"):  # what reads is refused, too: a pipeline
            with pytest.raises(Unavailable, match=code):
                await queue.get(job.id)
    for write in writes:
        write()
    assert (await queue.get(job.id)).state is JobState.SUCCEEDED
    assert [event.kind for event in await read_events(queue, job.id)] == ["state", "state", "progress", "state"]
    other = await queue.submit(sft("other"), idempotency_key="k")
    assert [one.id for one in await queue.list()] == [other.id, job.id]
    assert must_claim(consumer).id == other.id


def test_a_connection_to_what_is_no_primary_any_more_is_not_kept(settings: CommonSettings, raw: redis.Redis) -> None:
    """Its name may lead to the next primary by now; whoever kept the connection would never ask."""
    client = connect(settings)
    before = client.client_id()
    with demoted(raw), pytest.raises(Unavailable):
        call(lambda: client.set("key", "value"))
    assert client.client_id() != before
    client.close()
