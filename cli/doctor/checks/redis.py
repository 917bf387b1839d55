"""Redis or Valkey."""

from __future__ import annotations

import statistics
import time
from typing import Any

import redis
from packaging.version import InvalidVersion, Version

from cli.doctor.findings import Finding, failure, ok, warning
from cli.doctor.place import Place
from services.common.errors import Unavailable

_OLDEST = Version("7.0")
"""Oldest Redis: every Valkey is newer. The tests run with Valkey 9."""
_PINGS = 20
_SLOW_MS, _TOO_SLOW_MS = 5.0, 100.0
"""Median of an answer to PING: each event of a job, and each request with limits, waits for at least one."""


def answers(place: Place) -> Finding:
    """Redis answers, takes the password and is new enough."""
    try:
        client = place.redis
        info: Any = client.info()
    except Unavailable as error:
        if isinstance(error.__cause__, redis.AuthenticationError):
            return failure(
                f"Redis refuses user and password: {error.message.partition('away: ')[2]}",
                "correct the ones in TEMPER_REDIS_URL (redis://user:password@host:port/0)",
            )
        return failure(error.message, "start it, or correct TEMPER_REDIS_URL")
    except redis.RedisError as error:
        return failure(
            f"Redis (TEMPER_REDIS_URL) refuses commands: {error}", "allow this user all commands (ACL SETUSER)"
        )
    except ValueError as error:
        return failure(f"TEMPER_REDIS_URL is no address: {error}", "write it as redis://user:password@host:port/0")
    name, number = _version(info)
    if info.get("role") == "slave":
        return failure("TEMPER_REDIS_URL names a replica, which takes no writes", "name the primary, or its Sentinels")
    try:
        if name == "Redis" and Version(number) < _OLDEST:
            return failure(f"this is Redis {number}, Temper needs {_OLDEST} or newer", "use a newer Redis, or Valkey")
    except InvalidVersion:
        return warning(f"{name} says {number!r} is its version", f"use Redis {_OLDEST} or newer, or Valkey")
    return ok(f"{name} {number} answers")


def persistence(place: Place) -> Finding:
    """Redis has its append-only file on and can write it: else a restart loses jobs."""
    info = place.redis_info
    if not info.get("aof_enabled"):
        return warning(
            "Redis keeps no append-only file: jobs, batches and stored responses are gone after its restart",
            "CONFIG SET appendonly yes, and appendonly yes in its configuration file",
            mend=lambda: _append_only(place),
        )
    if info.get("aof_last_write_status") != "ok":
        return failure("Redis cannot write its append-only file", "look at its log and at the space on its disk")
    return ok("Redis keeps an append-only file")


def eviction(place: Place) -> Finding:
    """Redis evicts nothing when it is full."""
    policy = place.redis_info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and place.redis_info.get("maxmemory", 0):
        return failure(
            f"Redis evicts keys when it is full (maxmemory-policy {policy}): jobs would vanish",
            "CONFIG SET maxmemory-policy noeviction, and a server of its own for what may be evicted",
        )
    if policy != "noeviction":
        return warning(
            f"Redis would evict keys if it had a limit (maxmemory-policy {policy})",
            "CONFIG SET maxmemory-policy noeviction",
        )
    return ok("Redis evicts nothing")


def room(place: Place) -> Finding:
    """Redis has memory left."""
    info = place.redis_info
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if limit and used > 0.9 * limit:
        return warning(
            f"Redis uses {used / 2**20:,.0f} of {limit / 2**20:,.0f} MiB, and then refuses writes",
            "raise maxmemory, or lower TEMPER_RESPONSES_MAX_BYTES",
        )
    return ok(f"Redis uses {used / 2**20:,.0f} MiB" + (f" of {limit / 2**20:,.0f}" if limit else ", without a limit"))


def latency(place: Place) -> Finding:
    """Redis answers within milliseconds."""
    place.redis_info  # noqa: B018 - it answers
    seconds = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        place.redis.ping()
        seconds.append(time.perf_counter() - began)
    median = 1e3 * statistics.median(seconds)
    text = f"Redis answers in {median:.1f} ms"
    if median > _TOO_SLOW_MS:
        return failure(f"{text}, every request waits for it", "put it nearer, or find out what keeps it (SLOWLOG GET)")
    if median > _SLOW_MS:
        return warning(f"{text}, usual is less than 1", "put it nearer, or find out what keeps it (SLOWLOG GET)")
    return ok(text)


def _version(info: dict[str, Any]) -> tuple[str, str]:
    if "valkey_version" in info:
        return "Valkey", str(info["valkey_version"])
    return "Redis", str(info.get("redis_version", "?"))


def _append_only(place: Place) -> str:
    place.redis.config_set("appendonly", "yes")
    place.__dict__.pop("redis_info", None)
    try:
        place.redis.config_rewrite()
    except redis.ResponseError:
        return "CONFIG SET appendonly yes, until Redis restarts: it has no configuration file to write it into"
    return "CONFIG SET appendonly yes, and wrote it into its configuration file"
