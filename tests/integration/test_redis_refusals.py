"""Redis that is there and refuses: full, without a disk, no primary any more, busy with a script, forbidden."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from services.common.errors import Unavailable
from services.common.jobs import JobProgress, JobState
from services.common.queue.job_queue import JobQueue
from services.common.settings import CommonSettings
from services.common.storage.redis import call, connect
from tests.integration.jobs import Consumers, must_claim, read_events, sft
from tests.stack import PATIENCE


@contextmanager
def configured(raw: redis.Redis, **options: str) -> Iterator[None]:
    names = {name.replace("_", "-"): value for name, value in options.items()}
    before = {name: cast(dict[str, str], raw.config_get(name))[name] for name in names}
    for name, value in names.items():
        raw.config_set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            raw.config_set(name, value)


@contextmanager
def full(raw: redis.Redis) -> Iterator[None]:
    with configured(raw, maxmemory="1"):
        yield


@contextmanager
def without_disk(raw: redis.Redis) -> Iterator[None]:
    """What it would save to is a directory with something in it, so that its last attempt failed."""
    place = cast(dict[str, str], raw.config_get("dir"))["dir"]
    file = Path(place) / cast(dict[str, str], raw.config_get("dbfilename"))["dbfilename"]
    file.unlink(missing_ok=True)
    (file / "in the way").mkdir(parents=True)
    with configured(raw, save="3600 1000000"):
        _save(raw, "err")
        try:
            yield
        finally:
            (file / "in the way").rmdir()
            file.rmdir()
            _save(raw, "ok")


def _save(raw: redis.Redis, status: str) -> None:
    with suppress(redis.ResponseError):
        raw.save()
    raw.bgsave()
    for _ in range(int(PATIENCE * 20)):
        persistence: Any = raw.info("persistence")
        if not persistence["rdb_bgsave_in_progress"]:
            assert persistence["rdb_last_bgsave_status"] == status
            return
        threading.Event().wait(0.05)
    raise AssertionError("it still saves")


@contextmanager
def demoted(raw: redis.Redis) -> Iterator[None]:
    raw.replicaof("127.0.0.1", "1")
    try:
        yield
    finally:
        raw.replicaof("NO", "ONE")


@contextmanager
def cut_off(raw: redis.Redis) -> Iterator[None]:
    """A replica that has lost its primary and does not answer from what it has."""
    with configured(raw, replica_serve_stale_data="no"), demoted(raw):
        yield


@contextmanager
def alone(raw: redis.Redis) -> Iterator[None]:
    with configured(raw, min_replicas_to_write="1"):
        yield


@contextmanager
def busy(raw: redis.Redis) -> Iterator[None]:
    """Somebody's script does not end."""

    def spin() -> None:
        with suppress(redis.ResponseError):
            raw.eval("while true do end", 0)

    with configured(raw, busy_reply_threshold="10"):
        thread = threading.Thread(target=spin)
        thread.start()
        try:
            while True:
                try:
                    raw.ping()
                except redis.ResponseError:
                    break
            yield
        finally:
            raw.script_kill()
            thread.join()


@contextmanager
def forbidden(raw: redis.Redis) -> Iterator[None]:
    raw.acl_setuser("default", enabled=True, nopass=True, categories=["-@scripting"])
    try:
        yield
    finally:
        raw.acl_setuser("default", enabled=True, nopass=True, categories=["+@all"])


STATES = {
    "OOM": full,
    "MISCONF": without_disk,
    "READONLY": demoted,
    "MASTERDOWN": cut_off,
    "NOREPLICAS": alone,
    "BUSY": busy,
    "NOPERM": forbidden,
}


@pytest.mark.parametrize("code", STATES)
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
    with STATES[code](raw):
        tries = [queue.submit(sft("other"), idempotency_key="k"), *(asyncio.to_thread(write) for write in writes)]
        for outcome in await asyncio.gather(*tries, return_exceptions=True):
            assert isinstance(outcome, Unavailable), outcome
            assert f"(TEMPER_REDIS_URL) refuses: {code}" in outcome.message
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
