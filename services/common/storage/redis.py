"""Redis connections as every part of Temper makes them: RESP2 shapes, short timeouts, errors of our own tree."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
import tenacity
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.common.errors import Unavailable
from services.common.settings import CommonSettings
from services.common.storage.redis_url import sentinel_url

CONNECT_SECONDS = 2.0
SOCKET_SECONDS = 4.0
"""Silence after which a server counts as frozen; also the upper limit of blocking commands."""
BLOCK_SECONDS = 2.0
"""The longest that one blocking command waits."""
RETRY_SECONDS = 2.0
"""Refused connections are retried for this long; a command that timed out is not repeated."""
ASYNC_CONNECTIONS = 1000
"""Most connections of one gateway: a client that follows a job's events holds one."""

_NOT_UTF8 = "backslashreplace"
"""Pipelines write to the stream as well: bytes that are no text must not be an exception in every reader, for ever."""

_TEXT: Mapping[str, Any] = {
    "decode_responses": True,
    "encoding_errors": _NOT_UTF8,
    "socket_timeout": SOCKET_SECONDS,
    "socket_connect_timeout": CONNECT_SECONDS,
}
NOW: Final = """
local function now()
  local t = redis.call('TIME')
  return string.format('%d.%06d', tonumber(t[1]), tonumber(t[2]))
end
"""
"""Function for scripts: Redis's time in unix seconds, as a text."""
_LEAVES: Final = (redis.exceptions.ReadOnlyError,)
"""Errors after which a connection is closed: its server is no primary any more, and the name may lead to the next."""
T = TypeVar("T")
_CLOSED: Final = "the handler is closed"
"""What uvloop says, in a RuntimeError, of a connection that was reset and is written to before its reader has heard."""
_AWAY = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.InvalidResponse,  # an answer that is damaged; the connection is closed
    OSError,
)
_PASSING: Final = frozenset(
    {"READONLY", "BUSY", "NOSCRIPT", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "LOADING"}
)
"""Codes of a server that does nothing of the kind now, and may at once: the command is repeated."""
_REFUSING: Final = _PASSING | {"OOM", "MISCONF", "NOPERM", "NOAUTH", "WRONGPASS"}
"""Codes of a server that refuses a command for what it is itself, whatever the command says. None was carried out."""
_OF_PIPELINE: Final = "caused error: "
"""What redis-py writes before the error of a command in a pipeline; for asyncio, the error is a tuple's text."""


def connect(settings: CommonSettings) -> redis.Redis:
    """A blocking client that decodes to str."""
    return client_of(settings, **_TEXT, retry=Retry(NoBackoff(), 0), retry_on_error=[*_LEAVES])


def client_of(settings: CommonSettings, **options: Any) -> redis.Redis:
    """A blocking client of what TEMPER_REDIS_URL names.

    Args:
        options: of redis.Redis.

    Raises:
        ValueError: the URL is none.
    """
    url = settings.redis_url.get_secret_value()
    options = {"protocol": 2, **options}
    named = sentinel_url(url)
    if named is None:
        return redis.Redis.from_url(url, **options, **_trust(settings, url.startswith("rediss://")))
    options |= named.login | _trust(settings, named.tls)
    watch = redis.sentinel.Sentinel(named.sentinels, sentinel_kwargs=_asking(options), **options)  # type: ignore[no-untyped-call]
    client: redis.Redis = watch.master_for(named.service, db=named.database)  # type: ignore[no-untyped-call]
    return client


def connect_async(settings: CommonSettings) -> redis.asyncio.Redis:
    """An asyncio client that decodes to str."""
    url = settings.redis_url.get_secret_value()
    options = {"protocol": 2, **_TEXT, "max_connections": ASYNC_CONNECTIONS, "retry": AsyncRetry(NoBackoff(), 0)}
    options["retry_on_error"] = [*_LEAVES]
    named = sentinel_url(url)
    if named is None:
        return redis.asyncio.Redis.from_url(url, **options, **_trust(settings, url.startswith("rediss://")))
    options |= named.login | _trust(settings, named.tls)
    watch = redis.asyncio.sentinel.Sentinel(named.sentinels, sentinel_kwargs=_asking(options), **options)  # type: ignore[no-untyped-call]
    client: redis.asyncio.Redis = watch.master_for(named.service, db=named.database)
    return client


def _trust(settings: CommonSettings, tls: bool) -> dict[str, Any]:
    """Authorities beside the public ones, which redis-py trusts anyway."""
    return {"ssl_ca_certs": str(settings.ca_bundle)} if tls and settings.ca_bundle is not None else {}


def _asking(options: Mapping[str, Any]) -> dict[str, Any]:
    """A Sentinel answers at once, or another is asked."""
    kept = ("username", "password", "ssl", "ssl_ca_certs", "protocol")
    return {
        **{name: options[name] for name in kept if name in options},
        "socket_timeout": CONNECT_SECONDS,
        "socket_connect_timeout": CONNECT_SECONDS,
    }


def call(operation: Callable[[], T]) -> T:
    """Runs a command that may be repeated. Raises Unavailable when Redis is away, or in no state to do it."""
    try:
        return tenacity.Retrying(**_policy())(operation)
    except (*_AWAY, redis.exceptions.ResponseError) as error:
        if not _no_state_for_it(error):
            raise
        raise unavailable(error) from error


async def call_async(operation: Callable[[], Awaitable[T]]) -> T:
    """`call` for asyncio."""

    async def attempt() -> T:  # tenacity awaits coroutine functions only
        try:
            return await operation()
        except RuntimeError as error:
            if _CLOSED not in str(error):
                raise
            raise redis.exceptions.ConnectionError("the connection was closed") from error

    try:
        return await tenacity.AsyncRetrying(**_policy())(attempt)
    except (*_AWAY, redis.exceptions.ResponseError) as error:
        if not _no_state_for_it(error):
            raise
        raise unavailable(error) from error


async def read_hashes(
    client: redis.asyncio.Redis, keys: Sequence[str], fields: Sequence[str]
) -> Sequence[Sequence[Any]]:
    """Fields of hashes, in one round trip; None for one that is not there. Raises Unavailable."""

    async def read() -> Any:
        async with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hmget(key, list(fields))
            return await pipe.execute()

    return cast(Sequence[Sequence[Any]], await call_async(read))


async def ids_before(client: redis.asyncio.Redis, index: str, after: str | None, most: int) -> Sequence[str]:
    """Members of a sorted set whose scores are equal, last ones first, from behind ``after`` on. Raises Unavailable."""
    end = "+" if after is None else f"({after}"
    found: Any = await call_async(
        lambda: cast(Awaitable[Any], client.zrevrangebylex(index, end, "-", start=0, num=most))
    )
    return cast(Sequence[str], found)


def unavailable(error: Exception) -> Unavailable:
    """Error for a client, without the URL, which may hold a password."""
    text = (str(error) or type(error).__name__).splitlines()[0][:200]
    if not isinstance(error, redis.exceptions.ResponseError):
        return Unavailable(f"Redis (TEMPER_REDIS_URL) is away: {text}")
    code = _code(error)
    return Unavailable(f"Redis (TEMPER_REDIS_URL) refuses: {text if code in text else f'{code} {text}'}")


def _code(error: redis.exceptions.ResponseError) -> str:
    """What the answer begins with: redis-py cuts it off where it has a class for it."""
    text = str(error).rpartition(_OF_PIPELINE)[2]
    return error.status_code or text.lstrip("(\"'").partition(" ")[0]


def _no_state_for_it(error: Exception) -> bool:
    """True if that is trouble of the server or of the way to it; else the command is wrong."""
    return not isinstance(error, redis.exceptions.ResponseError) or _code(error) in _REFUSING


def _passes(error: BaseException) -> bool:
    if isinstance(error, redis.exceptions.ResponseError):
        return _code(error) in _PASSING
    return isinstance(error, _AWAY)


def _policy() -> dict[str, Any]:
    return {
        "retry": tenacity.retry_if_exception(_passes),
        "stop": tenacity.stop_after_delay(RETRY_SECONDS),
        "wait": tenacity.wait_random_exponential(multiplier=0.05, max=0.5),
        "reraise": True,
    }
