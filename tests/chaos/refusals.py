"""Refusals: states of a Redis that is there and does not do what it is asked, and the way into each and out of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.stack import PATIENCE

Refusal: TypeAlias = Callable[[redis.Redis], AbstractContextManager[None]]


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
        # Once, however long it takes.
        options = {**raw.connection_pool.connection_kwargs, "socket_timeout": None, "retry": Retry(NoBackoff(), 0)}
        own = redis.Redis(connection_pool=redis.ConnectionPool(**options))
        with own, suppress(redis.RedisError):
            own.eval("while true do end", 0)

    with configured(raw, busy_reply_threshold="10"):
        thread = threading.Thread(target=spin)
        thread.start()
        try:
            while thread.is_alive():
                try:
                    raw.ping()
                except redis.ResponseError:
                    break
            yield
        finally:
            if thread.is_alive():
                raw.script_kill()
            thread.join()


@contextmanager
def forbidden(raw: redis.Redis) -> Iterator[None]:
    raw.acl_setuser("default", enabled=True, categories=["-@scripting"])
    try:
        yield
    finally:
        raw.acl_setuser("default", enabled=True, categories=["+@all"])


REFUSALS: Mapping[str, Refusal] = {
    "OOM": full,
    "MISCONF": without_disk,
    "READONLY": demoted,
    "MASTERDOWN": cut_off,
    "NOREPLICAS": alone,
    "BUSY": busy,
    "NOPERM": forbidden,
}
"""State by the code that it answers with."""
