"""What an engine checks of Redis and the object store before it loads anything, against real servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from structlog.testing import capture_logs

from cli.local.ports import claim_ports
from cli.local.store_processes import valkey_server
from services.common.errors import Refused, Unavailable
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.engine.settings import EngineSettings
from services.pod.preflight import check_all, check_redis, check_store
from tests.integration.servers import RunningServer
from tests.stack import TINY


@pytest.fixture
def late(tmp_path: Path) -> Iterator[RunningServer]:
    """A Valkey that does not run yet."""
    server = RunningServer(valkey_server(tmp_path, claim_ports(1)[0]))
    yield server
    server.stop()


def engine(settings: CommonSettings, **given: object) -> EngineSettings:
    return EngineSettings.model_validate({**settings.model_dump(), "model": TINY, "grpc_port": 0, **given})


def test_an_engine_waits_for_what_starts_after_it(
    settings: CommonSettings, s3: RunningServer, late: RunningServer
) -> None:
    waiting = engine(settings, redis_url=f"redis://{late.address}/0", startup_wait_seconds=60)
    timer = threading.Timer(1.5, late.start)
    timer.start()
    with capture_logs() as logs:
        check_all(waiting)
    timer.join()
    said = [line["event"] for line in logs]
    assert said == ["waiting for Redis", "Redis answers"], "and not a line a second"
    assert "TEMPER_REDIS_URL" in logs[0]["reason"]
    ObjectStore(settings).put("key", b"the bucket was made")


def test_the_wait_is_bounded(settings: CommonSettings, late: RunningServer) -> None:
    absent = engine(settings, redis_url=f"redis://{late.address}/0", startup_wait_seconds=1)
    with pytest.raises(Unavailable, match=r"waited [1-9]\d* s, TEMPER_STARTUP_WAIT_SECONDS is 1\)"):
        check_all(absent)
    with pytest.raises(Unavailable) as at_once:
        check_all(engine(settings, redis_url=f"redis://{late.address}/0"))
    assert "waited" not in at_once.value.message


@pytest.mark.parametrize("given", ["", ":wrong@", "nobody:wrong@"])
def test_a_password_that_redis_refuses_is_not_waited_for(
    given: str, settings: CommonSettings, raw: redis.Redis, valkey: RunningServer
) -> None:
    raw.config_set("requirepass", "right-password")
    try:
        refused = engine(settings, redis_url=f"redis://{given}{valkey.address}/0", startup_wait_seconds=60)
        with pytest.raises(Refused, match=r"refuses user and password.*TEMPER_REDIS_URL") as error:
            check_all(refused)
        assert "waited" not in error.value.message
        assert "wrong" not in error.value.message.partition("refuses")[0]
        check_redis(engine(settings, redis_url=f"redis://:right-password@{valkey.address}/0"))
    finally:
        raw.config_set("requirepass", "")


@pytest.mark.parametrize("key", ["s3_access_key", "s3_secret_key"])
def test_credentials_that_s3_refuses_are_named(key: str, settings: CommonSettings, s3: RunningServer) -> None:
    with pytest.raises(Refused, match=r"TEMPER_S3_ACCESS_KEY.*TEMPER_S3_SECRET_KEY") as error:
        check_store(engine(settings, **{key: "something-else"}))
    assert "something-else" not in error.value.message


def test_engines_that_start_at_once_make_one_bucket(settings: CommonSettings, s3: RunningServer) -> None:
    failures: list[BaseException] = []

    def start() -> None:
        try:
            check_store(engine(settings))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
