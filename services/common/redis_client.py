"""Redis connections as every part of Temper makes them: RESP2 shapes, short timeouts, errors of our own tree."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis
import redis.asyncio
import tenacity
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.common.errors import Unavailable
from services.common.settings import CommonSettings

CONNECT_SECONDS = 2.0
SOCKET_SECONDS = 4.0
"""Silence after which a server counts as frozen; also the upper limit of blocking commands."""
BLOCK_SECONDS = 2.0
"""The longest that one blocking command waits."""
RETRY_SECONDS = 2.0
"""Refused connections are retried for this long; a command that timed out is not repeated."""
ASYNC_CONNECTIONS = 1000
"""Of one gateway: a client that follows a job's events holds one."""

_NOT_UTF8 = "backslashreplace"
"""Pipelines write to the stream as well: bytes that are no text must not be an exception in every reader, for ever."""

T = TypeVar("T")
_AWAY = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)
_REFUSED = (redis.exceptions.OutOfMemoryError, redis.exceptions.ReadOnlyError, redis.exceptions.AuthenticationError)


def connect(settings: CommonSettings) -> redis.Redis:
    """A blocking client that decodes to str."""
    return redis.Redis.from_url(
        settings.redis_url.get_secret_value(),
        protocol=2,
        decode_responses=True,
        encoding_errors=_NOT_UTF8,
        socket_timeout=SOCKET_SECONDS,
        socket_connect_timeout=CONNECT_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )


def connect_async(settings: CommonSettings) -> redis.asyncio.Redis:
    """An asyncio client that decodes to str."""
    return redis.asyncio.Redis.from_url(
        settings.redis_url.get_secret_value(),
        protocol=2,
        decode_responses=True,
        encoding_errors=_NOT_UTF8,
        socket_timeout=SOCKET_SECONDS,
        socket_connect_timeout=CONNECT_SECONDS,
        max_connections=ASYNC_CONNECTIONS,
        retry=AsyncRetry(NoBackoff(), 0),
    )


def call(operation: Callable[[], T]) -> T:
    """Runs a command that may be repeated. Raises Unavailable when Redis is away."""
    try:
        return tenacity.Retrying(**_policy())(operation)
    except (*_AWAY, *_REFUSED) as error:
        raise unavailable(error) from error


async def call_async(operation: Callable[[], Awaitable[T]]) -> T:
    """`call` for asyncio."""

    async def attempt() -> T:  # tenacity awaits coroutine functions only
        return await operation()

    try:
        return await tenacity.AsyncRetrying(**_policy())(attempt)
    except (*_AWAY, *_REFUSED) as error:
        raise unavailable(error) from error


def unavailable(error: Exception) -> Unavailable:
    """Without the URL, which may hold a password."""
    text = (str(error) or type(error).__name__).splitlines()[0][:200]
    return Unavailable(f"Redis (TEMPER_REDIS_URL) is away: {text}")


def _policy() -> dict[str, Any]:
    return {
        "retry": tenacity.retry_if_exception_type(_AWAY),
        "stop": tenacity.stop_after_delay(RETRY_SECONDS),
        "wait": tenacity.wait_random_exponential(multiplier=0.05, max=0.5),
        "reraise": True,
    }
