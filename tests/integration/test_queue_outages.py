"""The job queue when Valkey restarts, freezes or forgets, and when owners vanish."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from typing import Any

import pytest
import redis
import uvloop

from services.common.errors import Unavailable
from services.common.jobs import JobProgress, JobState
from services.common.queue.job_queue import JobQueue
from services.common.settings import CommonSettings
from services.common.storage.redis import call_async, connect_async
from tests.integration.jobs import Consumers, must_claim, read_events, sft, silence
from tests.integration.servers import RunningServer


async def test_lost_scripts_and_groups_are_made_again(queue: JobQueue, consumers: Consumers, raw: redis.Redis) -> None:
    consumer = consumers("a")
    await queue.submit(sft())
    claimed = must_claim(consumer)
    raw.script_flush()
    consumer.heartbeat(claimed)
    await queue.submit(sft())
    consumer.succeed(claimed, "math@1")
    raw.flushall()
    assert consumer.claim(0) is None
    await queue.submit(sft())
    must_claim(consumer)


@pytest.mark.parametrize("kill", [True, False])
async def test_restart_loses_nothing(
    kill: bool, queue: JobQueue, consumers: Consumers, valkey: RunningServer, raw: redis.Redis
) -> None:
    running, waiting = await queue.submit(sft()), await queue.submit(sft(), idempotency_key="k")
    consumer = consumers("a")
    claimed = must_claim(consumer)
    consumer.report(claimed, JobProgress(step=1, total_steps=2), {"loss": 1.0})
    with valkey.down(signal.SIGKILL if kill else signal.SIGTERM):
        began = time.monotonic()
        with pytest.raises(Unavailable, match="TEMPER_REDIS_URL"):
            await queue.submit(sft())
        with pytest.raises(Unavailable):
            consumer.heartbeat(claimed)
        assert time.monotonic() - began < 60
    consumer.heartbeat(claimed)
    consumer.succeed(claimed, "math@1")
    assert (await queue.get(running.id)).metrics == {"loss": 1.0}
    assert (await queue.submit(sft(), idempotency_key="k")).id == waiting.id
    assert must_claim(consumer).id == waiting.id


async def test_frozen_redis_is_unavailable_within_seconds(
    queue: JobQueue, consumers: Consumers, valkey: RunningServer
) -> None:
    job = await queue.submit(sft())
    consumer = consumers("a")
    claimed = must_claim(consumer)
    consumer.report(claimed, JobProgress(step=0, total_steps=2), {}, 1)
    with valkey.frozen():
        began = time.monotonic()
        with pytest.raises(Unavailable):
            await queue.ping()
        with pytest.raises(Unavailable):
            consumer.report(claimed, JobProgress(step=1, total_steps=2), {}, 2)
        assert time.monotonic() - began < 60
    # What was sent to the frozen server is carried out as well.
    consumer.report(claimed, JobProgress(step=1, total_steps=2), {}, 2)
    consumer.heartbeat(claimed)
    consumer.succeed(claimed, "math@1")
    assert (await queue.get(job.id)).state is JobState.SUCCEEDED
    steps = [event.data["step"] for event in await read_events(queue, job.id) if event.kind == "progress"]
    assert steps == [0, 1]


async def test_an_abandoned_job_is_found_behind_many_that_run(
    queue: JobQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    jobs = [await queue.submit(sft(f"a{number}")) for number in range(15)]
    busy, dead, heir = map(consumers, ("busy", "dead", "heir"))
    held = [must_claim(busy) for _ in jobs[:-1]]
    lost = must_claim(dead)
    silence(raw)
    for claimed in held:
        busy.heartbeat(claimed)
    assert must_claim(heir).id == lost.id


def test_a_connection_that_uvloop_has_closed_is_made_again(settings: CommonSettings, valkey: RunningServer) -> None:
    """A reset may be seen by the loop before redis-py reads: what is written then is no error of ours."""

    async def used_after_reset() -> str:
        client = connect_async(settings)
        await client.set("chaos", "kept")
        connection: Any = await client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        connection._writer.transport.abort()
        tries = itertools.count(1)

        async def read() -> str:
            number = next(tries)
            await connection.send_command("GET", "chaos")
            return f"{await connection.read_response()} at try {number}"

        try:
            return await call_async(read)
        finally:
            await client.connection_pool.release(connection)
            await client.aclose()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(used_after_reset()) == "kept at try 2"
