"""Real servers for the integration tests: one Valkey and one S3 server for the session, clean state for each test."""

from __future__ import annotations

import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis
from pydantic import SecretStr

from cli.local.ports import claim_ports
from cli.local.store_processes import s3_server, valkey_server
from services.common.adapters.registry import AdapterRegistry
from services.common.queue.job_queue import JobConsumer, JobQueue
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from tests.integration.jobs import RECLAIM, Consumers
from tests.integration.servers import RunningServer

ACCESS_KEY = "temper"
SECRET_KEY = "temper-secret"


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    server = RunningServer(valkey_server(tmp_path_factory.mktemp("valkey"), claim_ports(1)[0]))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("s3")
    server = RunningServer(s3_server(directory, claim_ports(1)[0], access_key=ACCESS_KEY, secret_key=SECRET_KEY))
    server.start()
    yield server
    server.stop(signal.SIGKILL)  # quicker, and what it would write goes to nobody


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> CommonSettings:
    """Settings of the real servers that the test also asks for; a bucket of its own."""
    values: dict[str, object] = {"s3_bucket": f"test-{uuid.uuid4().hex[:12]}"}
    if "s3" in request.fixturenames:
        server: RunningServer = request.getfixturevalue("s3")
        values |= {"s3_endpoint": server.address, "s3_access_key": SecretStr(ACCESS_KEY)}
        values |= {"s3_secret_key": SecretStr(SECRET_KEY)}
    if "valkey" in request.fixturenames:
        url = f"redis://{request.getfixturevalue('valkey').address}/0"
        values["redis_url"] = SecretStr(url)
        with redis.Redis.from_url(url) as client:
            client.flushall()
    return CommonSettings(**values)  # type: ignore[arg-type]


@pytest.fixture
def raw(valkey: RunningServer, settings: CommonSettings) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(settings.redis_url.get_secret_value(), decode_responses=True, protocol=2) as client:
        yield client


@pytest.fixture
def store(s3: RunningServer, settings: CommonSettings) -> ObjectStore:
    store = ObjectStore(settings)
    store.check()
    return store


@pytest.fixture
def registry(store: ObjectStore, settings: CommonSettings) -> AdapterRegistry:
    return AdapterRegistry(store, settings.served_model_name)


@pytest.fixture
def trainer_fields() -> dict[str, Any]:
    """Settings of a module's trainers (tests.integration.beside_engine)."""
    return {}


@pytest.fixture
def forge() -> None:
    """The forge of a module's trainers."""


@pytest.fixture
async def queue(valkey: RunningServer, settings: CommonSettings) -> AsyncIterator[JobQueue]:
    queue = JobQueue(settings)
    yield queue
    await queue.aclose()


@pytest.fixture
def consumers(valkey: RunningServer, settings: CommonSettings) -> Iterator[Consumers]:
    made: list[JobConsumer] = []

    def make(owner: str) -> JobConsumer:
        made.append(JobConsumer(settings, owner=owner, reclaim_seconds=RECLAIM))
        return made[-1]

    yield make
    for consumer in made:
        consumer.close()
