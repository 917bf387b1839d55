"""Redis that is there and refuses: full, without a disk, no primary any more, busy with a script, forbidden."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic import SecretStr

from cli.local.ports import claim_ports
from cli.local.store_processes import valkey_server
from services.common.errors import Unavailable
from services.common.jobs import JobProgress, JobState
from services.common.queue.job_queue import JobQueue
from services.common.settings import CommonSettings
from services.common.storage.redis import call, connect
from tests.chaos.refusals import REFUSALS, demoted
from tests.integration.jobs import Consumers, must_claim, read_events, sft
from tests.integration.servers import RunningServer
from tests.stack import PATIENCE


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


@pytest.fixture
def node(tmp_path: Path) -> Iterator[redis.Redis]:
    """A node of a cluster that has no slots yet."""
    port, bus = claim_ports(2)
    server = valkey_server(tmp_path, port)
    options = ("--cluster-enabled", "yes", "--cluster-port", str(bus.number))
    running = RunningServer(replace(server, argv=(*server.argv, *options)))
    running.start()
    client = connect(CommonSettings(redis_url=SecretStr(f"redis://{running.address}")))
    yield client
    client.close()
    running.stop()


def test_a_cluster_that_is_in_no_state_for_a_command_is_away(node: redis.Redis) -> None:
    """Its slots are nowhere, or keys of one slot on their way from node to node."""

    def cluster(command: str, *words: Any) -> Any:
        return node.execute_command(f"CLUSTER {command}", *words)

    with pytest.raises(Unavailable, match=r"\(TEMPER_REDIS_URL\) refuses: CLUSTERDOWN"):
        call(lambda: node.set("{slot}a", "1"))
    cluster("ADDSLOTSRANGE", 0, 16383)
    deadline = time.monotonic() + PATIENCE
    while cluster("INFO")["cluster_state"] != "ok":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    call(lambda: node.set("{slot}a", "1"))
    cluster("MEET", "127.0.0.1", 1)
    own = cluster("MYID")
    other = next(one["node_id"] for one in cluster("NODES").values() if one["node_id"] != own)
    slot = cluster("KEYSLOT", "{slot}")
    cluster("SETSLOT", slot, "MIGRATING", other)
    with pytest.raises(Unavailable, match=r"\(TEMPER_REDIS_URL\) refuses: TRYAGAIN"):
        call(lambda: node.eval("return 1", 2, "{slot}a", "{slot}b"))
    cluster("SETSLOT", slot, "STABLE")
    assert call(lambda: node.mget("{slot}a", "{slot}b")) == ["1", None]
