"""Batches on a real Valkey and a real S3 server: ownership, and gateways that die in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import redis

from cli.local.ports import claim_ports
from services.common.errors import Conflict, NotFound
from services.common.queue.delivery import JobLost
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.gateway.api.batches.stores import BatchStores
from services.gateway.core.batch_queue import BATCHES, NOW, BatchConsumer, BatchQueue, BatchSpec, ClaimedBatch
from services.gateway.core.file_store import FileStore
from tests.integration.jobs import RECLAIM, silence
from tests.integration.servers import RunningServer
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import Running
from tests.unit.gateway.fake_engine import FakeEngine, says

CHAT = "/v1/chat/completions"


def spec(owner: str = "me", **more: object) -> BatchSpec:
    return BatchSpec.model_validate({"owner": owner, "input_file_id": "file-x", "endpoint": CHAT, **more})


@pytest.fixture
async def queue(valkey: RunningServer, settings: CommonSettings) -> AsyncIterator[BatchQueue]:
    queue = BatchQueue(settings)
    yield queue
    await queue.aclose()


Consumers = Callable[[str], BatchConsumer]


@pytest.fixture
def consumers(valkey: RunningServer, settings: CommonSettings) -> Iterator[Consumers]:
    made: list[BatchConsumer] = []

    def make(owner: str) -> BatchConsumer:
        made.append(BatchConsumer(settings, owner=owner, reclaim_seconds=RECLAIM))
        return made[-1]

    yield make
    for consumer in made:
        consumer.close()


def must_claim(consumer: BatchConsumer) -> ClaimedBatch:
    claimed = consumer.claim(1)
    assert claimed is not None
    return claimed


async def test_life_of_a_batch(queue: BatchQueue, consumers: Consumers, raw: redis.Redis) -> None:
    batch = await queue.submit(spec(metadata={"a": "b"}, output_seconds=5))
    assert (batch.status, batch.spec) == ("validating", spec(metadata={"a": "b"}, output_seconds=5))
    assert abs(batch.created_at - time.time()) < 5
    consumer = consumers("a")
    claimed = must_claim(consumer)
    assert (claimed.id, claimed.spec, claimed.attempt) == (batch.id, batch.spec, 1)
    assert consumer.claim(0) is None
    first = consumer.stage(claimed, "in_progress", {"total": "3", "in_progress_at": NOW})
    again = consumer.stage(claimed, "in_progress", {"in_progress_at": NOW, "completed": "2"}, progressed=True)
    assert again == {"in_progress_at": first["in_progress_at"], "completed": "2"}
    running = await queue.owned("me", batch.id)
    assert (running.status, running.total, running.completed, running.failed) == ("in_progress", 3, 2, 0)
    assert consumer.publishing(claimed)
    with pytest.raises(Conflict, match="have run"):
        await queue.cancel("me", batch.id)
    consumer.stage(claimed, "finalizing", {"finalizing_at": NOW, "output_file_id": "file-y"})
    consumer.complete(claimed)
    consumer.complete(claimed)  # the answer got lost and the owner repeats it
    done = await queue.owned("me", batch.id)
    assert (done.status, done.output_file_id, done.spec) == ("completed", "file-y", batch.spec)
    assert done.finished_at is not None
    with pytest.raises(Conflict, match="completed"):
        await queue.cancel("me", batch.id)
    assert await queue.over(batch.id)
    assert raw.xlen(BATCHES.stream) == 0
    assert raw.hget(BATCHES.job_key(batch.id), "spec") is None
    assert not raw.keys("temper:batch-line:*")
    assert not raw.keys("temper:job*")  # training jobs are elsewhere


async def test_owners_do_not_see_each_other(queue: BatchQueue) -> None:
    mine = [(await queue.submit(spec())).id for _ in range(3)]
    theirs = await queue.submit(spec("you"))
    assert [batch.id for batch in await queue.list("me", limit=2)] == [mine[2], mine[1]]
    assert [batch.id for batch in await queue.list("me", limit=9, after=mine[1])] == [mine[0]]
    assert [batch.id for batch in await queue.list("you", limit=9)] == [theirs.id]
    for call in (queue.owned, queue.cancel):
        with pytest.raises(NotFound):
            await call("me", theirs.id)
    with pytest.raises(NotFound):
        await queue.list("me", limit=9, after=theirs.id)


async def test_unfinished_batches_are_counted_for_each_owner(queue: BatchQueue, consumers: Consumers) -> None:
    assert await queue.unfinished("me", most=9) == 0
    for owner in ("me", "you", "me", "me"):
        await queue.submit(spec(owner))
    assert [await queue.unfinished("me", most=most) for most in (9, 2)] == [3, 2]
    consumer = consumers("c")
    running = await asyncio.to_thread(consumer.claim, 0.1)
    assert running is not None
    assert await queue.unfinished("me", most=9) == 3, "one that runs has not ended"
    await asyncio.to_thread(consumer.complete, running)
    assert await queue.unfinished("me", most=9) == 2
    assert await queue.unfinished("you", most=9) == 1


async def test_an_idempotency_key_is_of_its_owner(queue: BatchQueue) -> None:
    first = await queue.submit(spec(), idempotency_key="k")
    assert (await queue.submit(spec(), idempotency_key="k")).id == first.id
    assert (found := await queue.submitted(spec(), "k")) is not None
    assert found.id == first.id
    assert await queue.submitted(spec("you"), "k") is None
    assert (await queue.submit(spec("you"), idempotency_key="k")).id != first.id
    with pytest.raises(Conflict, match=first.id):
        await queue.submit(spec(metadata={"a": "b"}), idempotency_key="k")


async def test_the_kinds_are_apart(queue: BatchQueue, consumers: Consumers, raw: redis.Redis) -> None:
    messages = queue.of("msgbatch")
    written = spec(endpoint="/v1/messages", requests=2, digest="d")
    mine = [(await messages.submit(written)).id for _ in range(4)]
    other = await queue.submit(spec())
    assert {batch_id.split("_")[0] for batch_id in mine} == {"msgbatch"}
    assert raw.hget(BATCHES.job_key(mine[0]), "schema") == "2", "an earlier release leaves it alone"
    assert raw.hget(BATCHES.job_key(other.id), "schema") == "1", "an earlier release may run it"
    assert "digest" not in (raw.hget(BATCHES.job_key(other.id), "spec") or "")
    assert await queue.unfinished("me", most=9) == await messages.unfinished("me", most=9) == 5
    assert [batch.id for batch in await queue.list("me", limit=9)] == [other.id]
    for view, batch_id in ((queue, mine[0]), (messages, other.id)):
        for call in (view.owned, view.cancel, view.remove):
            with pytest.raises(NotFound):
                await call("me", batch_id)
    newest_first = mine[::-1]
    assert [batch.id for batch in await messages.list("me", limit=2, after=newest_first[0])] == newest_first[1:3]
    assert [batch.id for batch in await messages.list("me", limit=2, before=newest_first[3])] == newest_first[1:3]
    assert [batch.id for batch in await messages.list("me", limit=9, before=newest_first[1])] == newest_first[:1]
    raw.delete(BATCHES.job_key(mine[1]))  # expired
    assert [batch.id for batch in await messages.list("me", limit=9, before=mine[0])] == [mine[3], mine[2]]
    with pytest.raises(NotFound):
        await messages.list("me", limit=2, before=other.id)
    claimed = must_claim(consumers("a"))
    assert (claimed.id, claimed.spec) == (mine[0], written)


async def test_removing(queue: BatchQueue, raw: redis.Redis) -> None:
    messages = queue.of("msgbatch")
    written = spec(endpoint="/v1/messages", requests=2, digest="d")
    batch = await messages.submit(written, idempotency_key="k")
    again = written.model_copy(update={"input_file_id": "file-of-another-try"})
    assert (await messages.submit(again, idempotency_key="k")).id == batch.id, "the same requests"
    with pytest.raises(Conflict, match="cancel it"):
        await messages.remove("me", batch.id)
    await messages.cancel("me", batch.id)
    with pytest.raises(NotFound):
        await messages.remove("you", batch.id)
    await messages.remove("me", batch.id)
    assert not raw.keys(f"{BATCHES.job_key(batch.id)}*")
    assert await messages.list("me", limit=9) == []
    other = written.model_copy(update={"digest": "e"})
    assert await messages.submitted(other, "k") is None, "the key is free again"
    assert (await messages.submit(other, idempotency_key="k")).id != batch.id


async def test_cancelling(queue: BatchQueue, consumers: Consumers) -> None:
    waiting = await queue.submit(spec())
    assert (await queue.cancel("me", waiting.id)).status == "cancelled"
    assert (await queue.cancel("me", waiting.id)).status == "cancelled"
    consumer = consumers("a")
    assert consumer.claim(0) is None
    # One that has begun is for its owner to end, also while it waits for the next.
    begun = await queue.submit(spec())
    claimed = must_claim(consumer)
    assert consumer.heartbeat(claimed) is False
    consumer.requeue(claimed)
    asked = await queue.cancel("me", begun.id)
    assert (asked.status, asked.state) == ("cancelling", "queued")
    assert asked.cancelling_at is not None
    claimed = must_claim(consumer)
    assert claimed.job.cancelling
    assert consumer.heartbeat(claimed) is True
    assert not consumer.publishing(claimed)
    consumer.cancelled(claimed)
    assert (await queue.owned("me", begun.id)).status == "cancelled"


async def test_an_owner_that_was_thought_dead_changes_nothing(
    queue: BatchQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    batch = await queue.submit(spec())
    old, new = consumers("old"), consumers("new")
    stale = must_claim(old)
    silence(raw, keyspace=BATCHES)
    fresh = must_claim(new)
    assert (fresh.id, fresh.attempt) == (batch.id, 2)
    for write in (
        lambda: old.heartbeat(stale),
        lambda: old.stage(stale, "finalizing", {"completed": "9"}),
        lambda: old.publishing(stale),
        lambda: old.complete(stale),
        lambda: old.requeue(stale),
    ):
        with pytest.raises(JobLost):
            write()
    assert (await queue.owned("me", batch.id)).status == "validating"
    assert fresh.job.created_at <= new.now() < fresh.job.created_at + PATIENCE
    new.expire(fresh)
    assert (await queue.owned("me", batch.id)).status == "expired"


async def test_given_up_after_three_deaths_without_progress(
    queue: BatchQueue, consumers: Consumers, raw: redis.Redis
) -> None:
    batch = await queue.submit(spec())
    consumer = consumers("a")
    for attempt in (1, 2):
        assert must_claim(consumer).attempt == attempt
        silence(raw, keyspace=BATCHES)
    claimed = must_claim(consumer)
    assert claimed.attempt == 3
    consumer.stage(claimed, "in_progress", {}, progressed=True)
    for attempt in (2, 3):
        silence(raw, keyspace=BATCHES)
        assert must_claim(consumer).attempt == attempt
    silence(raw, keyspace=BATCHES)
    assert consumer.claim(0) is None
    failed = await queue.owned("me", batch.id)
    assert failed.status == "failed"
    assert "given up after 3 attempts" in failed.errors[0].message
    ((_, letter),) = raw.xrange(BATCHES.dead)
    assert letter["job"] == batch.id


# Gateways.

OPTIONS = {"batch_workers": 1, "batch_concurrency": 8, "batch_heartbeat_seconds": 0.2, "batch_reclaim_seconds": 1.0}


class Second(BatchConsumer):
    """Takes nothing before it is told to."""

    waits = True

    def claim(self, block_seconds: float = 1.0) -> ClaimedBatch | None:
        if self.waits:
            time.sleep(0.05)
            return None
        return super().claim(block_seconds)


@contextlib.contextmanager
def gateway_process(settings: CommonSettings, engine: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real gateway; killed, if it still runs."""
    (port,) = claim_ports(1)
    env = {
        "TEMPER_REDIS_URL": settings.redis_url.get_secret_value(),
        "TEMPER_S3_ENDPOINT": settings.s3_endpoint,
        "TEMPER_S3_BUCKET": settings.s3_bucket,
        "TEMPER_SERVED_MODEL_NAME": "tiny",
        "TEMPER_ENGINES": engine,
        "TEMPER_PORT": str(port.number),
        **{f"TEMPER_{name.upper()}": str(value) for name, value in OPTIONS.items()},
    }
    with log.open("ab") as output:
        argv = [sys.executable, "-m", "services.gateway"]
        process = subprocess.Popen(argv, env={**os.environ, **env}, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port.number}"
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/readyz", verify=False, timeout=PATIENCE).status_code == 200:
                    break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def until(client: openai.OpenAI, batch_id: str, condition: Callable[[openai.types.Batch], bool]) -> openai.types.Batch:
    deadline = time.monotonic() + 60
    while not condition(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def chats(count: int) -> bytes:
    lines = [
        {
            "custom_id": f"request-{i}",
            "method": "POST",
            "url": CHAT,
            "body": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": i},
        }
        for i in range(count)
    ]
    return "\n".join(json.dumps(entry) for entry in lines).encode()


@pytest.fixture
def engine() -> FakeEngine:
    """Takes a third of a second for an answer: a batch runs for longer than until its first part."""
    return FakeEngine(behaviour=says("Hello", pause=0.05))


@pytest.fixture
def second(settings: CommonSettings) -> Second:
    return Second(settings, owner="second", reclaim_seconds=OPTIONS["batch_reclaim_seconds"])


@pytest.fixture
def client(
    valkey: RunningServer, settings: CommonSettings, store: ObjectStore, engine: FakeEngine, second: Second
) -> Iterator[openai.OpenAI]:
    """Of a gateway in this process, which takes no batch before `second` may."""
    running = Running(
        [engine],
        batching=lambda found: BatchStores(FileStore(store), BatchQueue(found), second),
        **{**settings.model_dump(exclude={"served_model_name"}), **OPTIONS},
    )
    running.start()
    plain = openai.DefaultHttpxClient(verify=False)
    yield openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, http_client=plain)
    running.stop()


def submit(client: openai.OpenAI, count: int) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", chats(count)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def completed(batch: openai.types.Batch) -> int:
    assert batch.request_counts is not None
    return batch.request_counts.completed


def check_all(client: openai.OpenAI, batch: openai.types.Batch, count: int) -> None:
    """Every request has one line."""
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (count, count, 0)
    output = [json.loads(line) for line in client.files.content(batch.output_file_id or "").text.splitlines()]
    assert sorted(entry["custom_id"] for entry in output) == sorted(f"request-{i}" for i in range(count))


def test_a_gateway_killed_in_the_middle(
    settings: CommonSettings,
    store: ObjectStore,
    engine: FakeEngine,
    client: openai.OpenAI,
    second: Second,
    tmp_path: Path,
) -> None:
    count = 80
    with gateway_process(settings, f"127.0.0.1:{engine.port}", tmp_path / "log") as process:
        batch = submit(client, count)
        stored = until(client, batch.id, lambda found: completed(found) > 0)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert stored.status == "in_progress"
    before = len(engine.requests)
    assert completed(stored) < before < count
    second.waits = False
    check_all(client, until(client, batch.id, lambda found: found.status == "completed"), count)
    # What was stored did not run again; only what had not been stored when the process died.
    assert len(engine.requests) <= count + before - completed(stored)
    assert store.list("batches/") == []


def test_redis_restarts_in_the_middle(valkey: RunningServer, client: openai.OpenAI, second: Second) -> None:
    second.waits = False
    batch = submit(client, 40)
    until(client, batch.id, lambda found: found.status == "in_progress")
    with valkey.down():
        with pytest.raises(openai.InternalServerError) as caught:
            client.batches.retrieve(batch.id)
        assert caught.value.status_code == 503
    check_all(client, until(client, batch.id, lambda found: found.status == "completed"), 40)
