"""Deliveries of events to webhooks in Redis: made of the outbox, claimed for a while, settled, and kept as a log.

Keys:
    temper:webhooks:due     sorted set of delivery ids by the time of their next attempt (unix seconds)
    temper:webhooks:all     sorted set of delivery ids by creation
    temper:webhooks:told    hash: pointer of adapters -> time of its newest move that is in the outbox
    temper:webhooks:sweep   there while pointers have just been looked at
    temper:webhook:{id}     hash: the delivery, its body and its attempts

A claim moves a delivery's time into the future: a gateway that dies with it leaves it to the others by itself, and as
long as it lives nobody else sends it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Sequence
from dataclasses import asdict
from typing import Any, Final, Literal, TypeAlias, cast

import structlog
from pydantic import Field

from services.common.adapters.pointer_document import Change
from services.common.errors import NewerSchema, NotFound
from services.common.settings import CommonSettings
from services.common.storage.outbox import NOTIFY, OUTBOX
from services.common.storage.record_versions import WEBHOOK, PassOver
from services.common.storage.redis import NOW, call_async, connect_async
from services.common.validation.strict_models import StrictModel

_DUE: Final = "temper:webhooks:due"
_ALL: Final = "temper:webhooks:all"
_TOLD: Final = "temper:webhooks:told"
_SWEEP: Final = "temper:webhooks:sweep"
_ROOT: Final = "temper:webhook:"
_NEWS_SECONDS = 3600
"""Age of a pointer's move that is told the first time that anything of the pointer is."""
_KEPT = 10_000
"""Deliveries that are remembered."""
_TTL = 7 * 86400
"""Seconds that a delivery is remembered after its end."""
_ATTEMPTS = 20
"""Newest attempts of a delivery that are remembered."""
OLDEST_SECONDS: Final = 3 * 86400
"""Age of an event from which it is news no more, and is dropped."""

State: TypeAlias = Literal["pending", "delivered", "failed"]

_PRELUDE = f"{NOW}local ROOT = '{_ROOT}'\n"
_MAKE = (
    _PRELUDE
    + f"""
-- KEYS outbox due all; ARGV entry event type body, then id and url of each delivery
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
for i = 5, #ARGV, 2 do
  redis.call('HSET', ROOT .. ARGV[i], 'id', ARGV[i], 'url', ARGV[i + 1], 'event', ARGV[2], 'type', ARGV[3], 'body',
    ARGV[4], 'state', 'pending', 'attempts', 0, 'created_at', now(), 'next_at', now(), 'schema', {WEBHOOK.version})
  redis.call('ZADD', KEYS[2], now(), ARGV[i])
  redis.call('ZADD', KEYS[3], now(), ARGV[i])
end
while redis.call('ZCARD', KEYS[3]) > {_KEPT} do
  local old = redis.call('ZPOPMIN', KEYS[3])[1]
  redis.call('DEL', ROOT .. old)
  redis.call('ZREM', KEYS[2], old)
end
return 1
"""
)
_CLAIM = (
    _PRELUDE
    + """
-- KEYS due; ARGV seconds most. The deliveries whose time has come, for nobody else until these seconds are over.
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now(), 'LIMIT', 0, ARGV[2])
for _, id in ipairs(found) do redis.call('ZADD', KEYS[1], tonumber(now()) + tonumber(ARGV[1]), id) end
return found
"""
)
_SETTLE = (
    _PRELUDE
    + f"""
-- KEYS due; ARGV id state attempt delay. What was delivered stays so, whatever a late sender says.
local hash = ROOT .. ARGV[1]
local state = redis.call('HGET', hash, 'state')
if not state then
  redis.call('ZREM', KEYS[1], ARGV[1])
  return 'MISSING'
end
if state == 'delivered' then return 'OK' end
local log = cjson.decode(redis.call('HGET', hash, 'log') or '[]')
table.insert(log, cjson.decode(ARGV[3]))
while #log > {_ATTEMPTS} do table.remove(log, 1) end
redis.call('HINCRBY', hash, 'attempts', 1)
redis.call('HSET', hash, 'state', ARGV[2], 'log', cjson.encode(log))
if ARGV[2] == 'pending' then
  local at = string.format('%.3f', tonumber(now()) + tonumber(ARGV[4]))
  redis.call('HSET', hash, 'next_at', at)
  redis.call('ZADD', KEYS[1], at, ARGV[1])
else
  redis.call('HSET', hash, 'ended_at', now())
  redis.call('HDEL', hash, 'next_at')
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('EXPIRE', hash, {_TTL})
end
return 'OK'
"""
)
_TELL = (
    _PRELUDE
    + NOTIFY
    + f"""
-- KEYS told; ARGV JSON. Each move of a pointer once: those later than the last one of its pointer that was told. What
-- moved long before anybody told of it is no news.
for _, move in ipairs(cjson.decode(ARGV[1])) do
  local last = redis.call('HGET', KEYS[1], move.key) or (tonumber(now()) - {_NEWS_SECONDS})
  if move.at > tonumber(last) then
    notify(move.type, move.data)
    redis.call('HSET', KEYS[1], move.key, string.format('%.3f', move.at))
  end
end
"""
)
_RESEND = (
    _PRELUDE
    + """
-- KEYS due; ARGV id. Once more from the first attempt on, now.
local hash = ROOT .. ARGV[1]
if redis.call('EXISTS', hash) == 0 then return 'MISSING' end
redis.call('HSET', hash, 'state', 'pending', 'attempts', 0, 'next_at', now())
redis.call('HDEL', hash, 'ended_at')
redis.call('PERSIST', hash)
redis.call('ZADD', KEYS[1], now(), ARGV[1])
return 'OK'
"""
)


class Attempt(StrictModel):
    """One attempt to deliver an event."""

    at: float
    """Unix seconds, like every time here."""
    status: int | None = None
    """HTTP status of the answer; null: there was none."""
    error: str | None = None
    """Reason why it failed; null: it did not."""
    seconds: float


class Delivery(StrictModel):
    """An event on its way to one URL."""

    id: str
    event: str
    """Id of the event, the `webhook-id` of every attempt."""
    type: str
    url: str
    state: State
    attempts: int
    created_at: float
    next_at: float | None = None
    """Time of the next attempt."""
    ended_at: float | None = None
    log: tuple[Attempt, ...] = ()
    """The newest attempts, oldest first."""
    body: str = Field(exclude=True)


class OutboxEvent(StrictModel):
    """An entry of the outbox."""

    entry: str
    type: str
    data: dict[str, Any]
    url: str

    @property
    def id(self) -> str:
        return f"evt_{self.entry.replace('-', '_')}"

    @property
    def time(self) -> int:
        """Unix seconds."""
        return int(self.entry.partition("-")[0]) // 1000

    @property
    def body(self) -> str:
        """Payload, the same bytes at every attempt."""
        event = {"id": self.id, "object": "event", "created_at": self.time, "type": self.type, "data": self.data}
        return json.dumps(event, ensure_ascii=False, separators=(",", ":"))


# Spelled out, because WebhookStore has a method `list`.
Deliveries: TypeAlias = list[Delivery]
log = structlog.get_logger("webhooks")
Events: TypeAlias = list[OutboxEvent]


class WebhookStore:
    """Store of deliveries. For one asyncio loop; every method may raise Unavailable."""

    def __init__(self, settings: CommonSettings) -> None:
        self._redis = connect_async(settings)
        self._make, self._claim, self._settle, self._resend, self._tell = map(
            self._redis.register_script, (_MAKE, _CLAIM, _SETTLE, _RESEND, _TELL)
        )

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def tell(self, changes: Sequence[Change]) -> None:
        """Adds the moves of pointers to the outbox, each once, however often and by whomever they are given here.

        They are in the object store, so they cannot be written in one step with their events. But they stay there, and
        this is repeated until it succeeds."""
        if changes:
            moves = json.dumps([asdict(change) for change in changes])
            await call_async(lambda: self._tell(keys=[_TOLD], args=[moves]))

    async def sweeps(self, seconds: float) -> bool:
        """Whether the pointers are to be looked at by this gateway now; nobody else does for so many seconds."""
        return bool(await call_async(lambda: self._redis.set(_SWEEP, "1", nx=True, px=int(seconds * 1000))))

    async def events(self, most: int) -> Events:
        """The oldest events of the outbox."""
        found: Any = await call_async(lambda: self._redis.xrange(OUTBOX, count=most))
        return [
            OutboxEvent(entry=entry, type=fields["type"], data=json.loads(fields["data"]), url=fields.get("url", ""))
            for entry, fields in found
        ]

    async def make(self, event: OutboxEvent, urls: Sequence[str]) -> bool:
        """Takes an event out of the outbox and makes a delivery to each of these URLs, in one step; False: another
        gateway was quicker."""
        pairs = [part for url in urls for part in (_delivery_id(event, url), url)]
        args = [event.entry, event.id, event.type, event.body, *pairs]
        made: Any = await call_async(lambda: self._make(keys=[OUTBOX, _DUE, _ALL], args=args))
        return bool(made)

    async def claim(self, most: int, seconds: float) -> Deliveries:
        """Deliveries whose time has come, which nobody else claims for so many seconds."""
        ids: Any = await call_async(lambda: self._claim(keys=[_DUE], args=[seconds, most]))
        found: Deliveries = []
        for one in ids:
            try:
                delivery = await self._get(one)
            except NewerSchema as error:  # left to a gateway that knows it
                log.warning("webhooks.newer", error=error.message)
                continue
            if delivery is not None:
                found.append(delivery)
            else:  # it was forgotten
                await self._forget(_DUE, one)
        return found

    async def settle(self, delivery_id: str, state: State, attempt: Attempt, delay: float = 0.0) -> None:
        """Writes how an attempt went. ``delay``: seconds to the next one of a delivery that is pending still."""
        args: list[str | float] = [delivery_id, state, attempt.model_dump_json(exclude_none=True), delay]
        await call_async(lambda: self._settle(keys=[_DUE], args=args))

    async def resend(self, delivery_id: str) -> Delivery:
        """Delivers an event once more, beginning now. Raises NotFound, NewerSchema."""
        await self.get(delivery_id)
        await call_async(lambda: self._resend(keys=[_DUE], args=[delivery_id]))
        return await self.get(delivery_id)

    async def get(self, delivery_id: str) -> Delivery:
        """Raises NotFound."""
        found = await self._get(delivery_id)
        if found is None:
            raise NotFound(f"no such delivery: {delivery_id[:80]!r}", param="delivery_id")
        return found

    async def list(
        self, *, limit: int, after: str | None = None, state: State | None = None, pass_over: PassOver | None = None
    ) -> Deliveries:
        """Deliveries, newest first, from behind ``after`` on.

        Args:
            pass_over: told of those that a later release wrote, whatever their state. None: they are an error.

        Raises:
            NotFound: there is no such one.
            NewerSchema: there is one of a later release.
        """
        start = 0
        if after is not None:
            rank = await call_async(lambda: cast(Awaitable[int | None], self._redis.zrevrank(_ALL, after)))
            if rank is None:
                raise NotFound(f"no such delivery: {after[:80]!r}", param="after")
            start = rank + 1
        ids: Any = await call_async(lambda: self._redis.zrange(_ALL, start, -1, desc=True))
        found: Deliveries = []
        for one in ids:
            try:
                delivery = await self._get(one)
            except NewerSchema as error:
                if pass_over is None:
                    raise
                pass_over(one, None, error)
                continue
            if delivery is None:
                await self._forget(_ALL, one)
            elif state in (None, delivery.state):
                found.append(delivery)
                if len(found) == limit:
                    break
        return found

    async def _forget(self, index: str, delivery_id: str) -> None:
        await call_async(lambda: self._redis.zrem(index, delivery_id))

    async def _get(self, delivery_id: str) -> Delivery | None:
        key = f"{_ROOT}{delivery_id}"
        fields: Any = await call_async(lambda: cast(Awaitable[Any], self._redis.hgetall(key)))
        if not fields:
            return None
        WEBHOOK.check(fields.get("schema"), f"delivery {delivery_id}")
        attempts = json.loads(fields.get("log") or "[]") or []
        numbers = {name: float(fields[name]) for name in ("created_at", "next_at", "ended_at") if name in fields}
        words = {name: fields[name] for name in ("id", "event", "type", "url", "state", "body")}
        with WEBHOOK.reading(f"delivery {delivery_id}"):
            return Delivery(
                **words,
                **numbers,
                attempts=int(fields["attempts"]),
                log=tuple(Attempt.model_validate(one) for one in attempts),
            )


def _delivery_id(event: OutboxEvent, url: str) -> str:
    return f"whd_{event.entry.replace('-', '_')}_{hashlib.sha256(url.encode()).hexdigest()[:8]}"
