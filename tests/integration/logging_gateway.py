"""Gateways that log to the real Valkey and S3 server, in front of scripted engines, and what they have logged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from services.common.security.api_keys import Scope
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.gateway.api.batches.stores import open_batching
from services.gateway.server.app import Stores
from services.learning.request_log.index import RequestIndex
from services.learning.request_log.log import RequestFilter, RequestLog
from services.learning.request_log.parts import Parts
from services.learning.request_log.record import LoggedRequest
from tests.integration.servers import RunningServer
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.gateway.key_file import Keys

KEEP = 86400
ALL = RequestFilter(None)
Gateway = Callable[..., tuple[Running, Keys]]


@pytest.fixture
def log(valkey: RunningServer, settings: CommonSettings, store: ObjectStore) -> Iterator[RequestLog]:
    index = RequestIndex(settings, keep_seconds=KEEP)
    yield RequestLog(Parts(store), index)
    index.close()


@pytest.fixture
def gateway(valkey: RunningServer, settings: CommonSettings, store: ObjectStore, tmp_path: Path) -> Iterator[Gateway]:
    """Gateways that log to the real stores, and keys of an app, another one, a trainer and an administrator."""
    keys = Keys(tmp_path / "keys.json")
    keys.add("app", Scope.INFERENCE)
    keys.add("other", Scope.INFERENCE)
    keys.add("quiet", Scope.INFERENCE)
    keys.add("trainer", Scope.TRAIN)
    keys.change("quiet", log_share=0.0)
    keys.add("admin", Scope.ADMIN, Scope.INFERENCE)
    started: list[Running] = []

    def start(engine: FakeEngine | None = None, opened: Stores | None = None, **more: Any) -> tuple[Running, Keys]:
        names = ("redis_url", "s3_endpoint", "s3_access_key", "s3_secret_key", "s3_bucket")
        stores = {name: getattr(settings, name) for name in names}
        options = {
            "request_log": True,
            "request_log_part_seconds": 0.1,
            "request_log_spool": tmp_path / "spool",
            "api_keys_file": str(keys.path),
        }
        given = {**stores, **options, **more}
        running = Running([engine or FakeEngine()], batching=open_batching, learns=True, stores=opened, **given)
        started.append(running)
        running.start()
        return running, keys

    yield start
    for running in started:
        running.stop()


def ask(running: Running, keys: Keys, path: str = "/v1/chat/completions", *, key: str = "app", **body: Any) -> Any:
    body = {"model": MODEL, **({"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {}), **body}
    answer = httpx.post(running.url + path, json=body, headers=keys.bearer(key), timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json() if not body.get("stream") else answer.text


def logged(log: RequestLog, count: int, wanted: RequestFilter = ALL) -> list[LoggedRequest]:
    """All that is logged, once there is so much."""
    deadline = time.monotonic() + PATIENCE
    while len(found := log.newest(wanted, limit=1000)) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def everywhere(raw: redis.Redis, store: ObjectStore, spool: Path) -> bytes:
    """All bytes in Redis, in the object store and on the disk."""
    found = [f"{key} {_value(raw, key)}".encode() for key in raw.keys("*")]
    found += [store.get(key).data for key in store.list("")]
    found += [file.read_bytes() for file in spool.glob("*")]
    return b"\n".join(found)


def _value(raw: redis.Redis, key: str) -> Any:
    """A value as it was written; DUMP would compress it."""
    reads: dict[str, Callable[[], Any]] = {
        "string": lambda: raw.get(key),
        "hash": lambda: raw.hgetall(key),
        "list": lambda: raw.lrange(key, 0, -1),
        "set": lambda: raw.smembers(key),
        "zset": lambda: raw.zrange(key, 0, -1),
        "stream": lambda: raw.xrange(key),
        "none": lambda: None,
    }
    return reads[str(raw.type(key))]()
