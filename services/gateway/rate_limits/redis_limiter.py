"""Rate limits in Redis, shared by all gateways, and the Lua scripts that change them.

Every call that waits goes out in one pipeline, and none waits for long. A gateway has one connection for this and one
task that uses it. Calls that arrive while a pipeline is out go with the next one, so a burst of requests costs a few
round trips, not a connection each.

Keys:
    temper:quota:{caller}           hash: level and time of the two buckets
    (services/gateway/rate_limits/memory_limiter.py)
    temper:quota:{caller}:leases    sorted set of requests that run, by the time at which each counts as lost

Both expire by themselves. Times are Redis's own clock in microseconds, so that gateways need not agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis
import structlog

from services.common.settings import CommonSettings
from services.common.storage.redis import connect_async, unavailable
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.rate_limits.limits import Decision, Dimension, Level, Limits
from services.gateway.rate_limits.memory_limiter import BUSY_WAIT, MINUTE

LEASE_SECONDS = 30
"""A request whose gateway has not renewed its lease for so long does not count any more."""
CLOCK = """local function clock()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000000 + tonumber(t[2])
end"""


def bucket_key(caller: str) -> str:
    return f"temper:quota:{caller}"


def leases_key(caller: str) -> str:
    return f"temper:quota:{caller}:leases"


_PRELUDE = f"""
{CLOCK}
local function text(number) return string.format('%.0f', number) end
local function level(key, name, limit, now)
  local state = redis.call('HMGET', key, name, name .. ':at')
  return math.max(0, tonumber(state[1] or '0') - math.max(0, now - tonumber(state[2] or '0')) * limit)
end
local function keep(key, name, value, limit, now)
  redis.call('HSET', key, name, text(value), name .. ':at', text(now))
  local ttl = math.ceil(value / limit / 1000) + 60000
  if redis.call('PTTL', key) < ttl then redis.call('PEXPIRE', key, text(ttl)) end
end
local function wait(value, limit, cost)
  return math.max(0, math.ceil((value + (cost - limit) * {MINUTE}) / limit))
end
local function answer(by, waits, requests, rate, tokens, budget)
  local function remaining(value, limit)
    return limit > 0 and math.floor(math.max(0, limit * {MINUTE} - value) / {MINUTE}) or 0
  end
  local function empty(value, limit) return limit > 0 and math.ceil(value / limit) or 0 end
  return {{by, waits, remaining(requests, rate), empty(requests, rate), remaining(tokens, budget),
    empty(tokens, budget)}}
end
"""

ACQUIRE = (
    _PRELUDE
    + f"""
-- KEYS buckets leases; ARGV requests-a-minute tokens-a-minute concurrent lease. Counts a request, or does nothing.
local rate, budget, most, now = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), clock()
local requests, tokens = level(KEYS[1], 'requests', rate, now), level(KEYS[1], 'tokens', budget, now)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', text(now))
local by, waits = '', 0
if most > 0 and redis.call('ZCARD', KEYS[2]) >= most then by, waits = 'concurrency', {BUSY_WAIT} end
if by == '' and rate > 0 then
  waits = wait(requests, rate, 1)
  if waits > 0 then by = 'requests' end
end
if by == '' and budget > 0 then
  waits = wait(tokens, budget, 1)
  if waits > 0 then by = 'tokens' end
end
if by == '' then
  if rate > 0 then
    requests = requests + {MINUTE}
    keep(KEYS[1], 'requests', requests, rate, now)
  end
  if most > 0 then
    redis.call('ZADD', KEYS[2], text(now + {LEASE_SECONDS}000000), ARGV[4])
    redis.call('EXPIRE', KEYS[2], {LEASE_SECONDS * 2})
  end
end
return answer(by, waits, requests, rate, tokens, budget)
"""
)

TAKE = (
    _PRELUDE
    + f"""
-- KEYS buckets; ARGV tokens-a-minute tokens force. Reserves tokens, or does nothing. With force, a correction: more
-- than fits, or a negative number.
local budget, cost, now = tonumber(ARGV[1]), tonumber(ARGV[2]), clock()
local tokens = level(KEYS[1], 'tokens', budget, now)
local waits = ARGV[3] == '1' and 0 or wait(tokens, budget, cost)
if waits == 0 then
  tokens = math.max(0, tokens + cost * {MINUTE})
  keep(KEYS[1], 'tokens', tokens, budget, now)
end
return answer(waits > 0 and 'tokens' or '', waits, 0, 0, tokens, budget)
"""
)

RELEASE = """
-- KEYS leases; ARGV lease
return redis.call('ZREM', KEYS[1], ARGV[1])
"""

RENEW = (
    _PRELUDE
    + f"""
-- KEYS leases; ARGV lease ... Also brings back leases that Redis has lost.
local expires = text(clock() + {LEASE_SECONDS}000000)
for _, lease in ipairs(ARGV) do redis.call('ZADD', KEYS[1], expires, lease) end
redis.call('EXPIRE', KEYS[1], {LEASE_SECONDS * 2})
return #ARGV
"""
)


CALL_SECONDS = 0.05
"""Longest time of one pipeline. A call waits for the one before it and for its own."""
_GRACE = 0.005
_CALLS_AT_ONCE = 64
PROBE_SECONDS = 1.0
"""Pause between two attempts to reach a Redis that is away."""
RENEW_SECONDS = LEASE_SECONDS / 3
_DIMENSIONS: dict[str, Dimension | None] = {
    "": None,
    "requests": "requests",
    "tokens": "tokens",
    "concurrency": "concurrency",
}
log = structlog.get_logger(__name__)
T = TypeVar("T")
Leases = Callable[[], Mapping[str, set[str]]]


@dataclass(slots=True)
class _Call:
    script: str
    keys: Sequence[str]
    args: Sequence[str | int]
    reply: asyncio.Future[Any] | None = None


class RedisLimiter:
    """Limiter that runs the scripts in Redis. It answers None where Redis is away: then its caller decides.

    Args:
        settings: where Redis is.
        metrics: says whether Redis decides.
        leases: the requests that run here, by caller: their leases are renewed.
    """

    def __init__(self, settings: CommonSettings, metrics: GatewayMetrics, leases: Leases) -> None:
        pool: Any = connect_async(settings).connection_pool
        self._connection = pool.make_connection()
        self._connection.socket_timeout = None  # the time of a whole exchange is limited instead
        self._metrics = metrics
        self._leases = leases
        self._shas = {
            script: hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()  # what Redis names it by
            for script in (ACQUIRE, TAKE, RELEASE, RENEW)
        }
        self._calls: list[_Call] = []
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._away = False

    async def start(self) -> None:
        """Connects, if Redis is there now, and begins to take calls."""
        with contextlib.suppress(redis.exceptions.RedisError, OSError):  # the first call that needs it will notice
            await self._bounded(self._greet())
        self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._renew())]

    async def stop(self) -> None:
        """Sends what is left, if Redis is there, and closes the connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._calls and not self._away:
            await self._exchange()
        await self._drop_connection()

    @property
    def away(self) -> bool:
        """Redis did not answer in time, and has not been reached since."""
        return self._away

    async def acquire(self, caller: str, limits: Limits, lease: str) -> Decision | None:
        """Counts a request and takes a lease, or does nothing."""
        keys = [bucket_key(caller), leases_key(caller)]
        args: list[str | int] = [
            limits.requests_per_minute,
            limits.tokens_per_minute,
            limits.concurrent_requests,
            lease,
        ]
        try:
            return _decision(await self._ask(ACQUIRE, keys, args), limits)
        except asyncio.CancelledError:
            self.release(caller, lease)  # it may have been granted
            raise

    async def take(self, caller: str, limits: Limits, tokens: int) -> Decision | None:
        """Reserves tokens, or does nothing."""
        args = [limits.tokens_per_minute, tokens, 0]
        return _decision(await self._ask(TAKE, [bucket_key(caller)], args), limits)

    def correct(self, caller: str, limits: Limits, tokens: int) -> None:
        """Adds tokens that were used beyond a reservation; negative: gives back what was not. Does not wait."""
        self._tell(TAKE, [bucket_key(caller)], [limits.tokens_per_minute, tokens, 1])

    def release(self, caller: str, lease: str) -> None:
        """A request is over. Does not wait."""
        self._tell(RELEASE, [leases_key(caller)], [lease])

    async def _ask(self, script: str, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        if self._away:
            return None
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._put(_Call(script, keys, args, reply))
        return await reply

    def _tell(self, script: str, keys: Sequence[str], args: Sequence[str | int]) -> None:
        if not self._away:
            self._put(_Call(script, keys, args))

    def _put(self, call: _Call) -> None:
        self._calls.append(call)
        self._wake.set()

    async def _pump(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._calls and not self._away:
                await self._exchange()
            while self._away:
                await asyncio.sleep(PROBE_SECONDS)
                await self._probe()

    async def _exchange(self) -> None:
        """Sends the oldest calls and hands out their replies; None to everybody who waits if that fails."""
        calls, self._calls = self._calls[:_CALLS_AT_ONCE], self._calls[_CALLS_AT_ONCE:]
        try:
            replies = await self._bounded(self._send(calls))
        except asyncio.CancelledError:
            _hand_out(calls, [None] * len(calls))
            raise
        except Exception as error:  # whatever it is: nobody may wait for a reply that does not come
            self._note_loss(error)
            calls, self._calls = calls + self._calls, []
            _hand_out(calls, [None] * len(calls))
            await self._drop_connection()
        else:
            _hand_out(calls, replies)

    async def _bounded(self, work: Awaitable[T]) -> T:
        """The work's result, unless it takes too long.

        The time is over only when the event loop has run once more after it: a loop that is behind finds its timers and
        what arrived meanwhile at the same moment, and what arrived counts.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as bound:
            timer = loop.call_later(CALL_SECONDS - _GRACE, lambda: bound.reschedule(loop.time() + _GRACE))
            try:
                return await work
            finally:
                timer.cancel()

    async def _send(self, calls: Sequence[_Call]) -> list[Any]:
        replies = await self._round_trip(calls)
        unknown = [i for i, reply in enumerate(replies) if isinstance(reply, redis.exceptions.NoScriptError)]
        if unknown:
            await self._load_scripts()
            for i, reply in zip(unknown, await self._round_trip([calls[i] for i in unknown]), strict=True):
                replies[i] = reply
        for reply in replies:
            if isinstance(reply, redis.exceptions.ResponseError):
                raise reply
        return replies

    async def _round_trip(self, calls: Sequence[_Call]) -> list[Any]:
        # On the connection itself: redis-py's pipelines cost three times as much a call.
        commands = [("EVALSHA", self._shas[call.script], len(call.keys), *call.keys, *call.args) for call in calls]
        return await self._commands(commands)

    async def _load_scripts(self) -> None:
        await self._commands([("SCRIPT", "LOAD", script) for script in self._shas])

    async def _commands(self, commands: Sequence[tuple[str | int, ...]]) -> list[Any]:
        connection = self._connection
        await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        replies: list[Any] = []
        for _ in commands:
            try:
                replies.append(await connection.read_response())
            except redis.exceptions.ResponseError as error:
                replies.append(error)
        return replies

    def _note_loss(self, error: Exception) -> None:
        if not self._away:
            reason = unavailable(error).message if str(error) else f"Redis did not answer within {CALL_SECONDS:g} s"
            log.warning("limits of keys are counted by each gateway alone", reason=reason)
            self._metrics.quota_fallbacks.inc()
        self._away = True
        self._metrics.quota_shared.set(0)

    async def _drop_connection(self) -> None:
        """Closes the connection: an answer that still comes must not be read as the answer to another command."""
        with contextlib.suppress(redis.exceptions.RedisError, OSError):
            await self._connection.disconnect(nowait=True)

    async def _probe(self) -> None:
        """Tries to reach Redis, and tells it which requests run."""
        try:
            await self._bounded(self._greet())
        except Exception as error:  # whatever it is, no thread to look up a name for one: limits must be shared again
            self._note_loss(error)
            await self._drop_connection()
            return
        self._away = False
        self._metrics.quota_shared.set(1)
        log.info("limits of keys are shared through Redis again")

    async def _greet(self) -> None:
        await self._load_scripts()
        for caller, leases in self._leases().items():
            await self._send([_renewal(caller, leases)])

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            self.renew()

    def renew(self) -> None:
        """Tells Redis which requests run. Does not wait."""
        if not self._away:
            for caller, leases in self._leases().items():
                self._put(_renewal(caller, leases))


def _renewal(caller: str, leases: set[str]) -> _Call:
    return _Call(RENEW, [leases_key(caller)], sorted(leases))


def _hand_out(calls: Sequence[_Call], replies: Sequence[Any]) -> None:
    for call, reply in zip(calls, replies, strict=True):
        if call.reply is not None and not call.reply.done():
            call.reply.set_result(reply)


def _decision(reply: Any, limits: Limits) -> Decision | None:
    if reply is None:
        return None
    by, wait, requests, requests_empty, tokens, tokens_empty = reply
    return Decision(
        _DIMENSIONS[by],
        wait,
        Level(requests, requests_empty) if limits.requests_per_minute else None,
        Level(tokens, tokens_empty) if limits.tokens_per_minute else None,
    )
