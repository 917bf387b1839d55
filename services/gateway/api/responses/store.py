"""Store of responses in Redis, so that every gateway finds them and a restart loses none. Documents
(services/gateway/api/responses/documents.py) lie there as well, in the same form, for the same time and within
the same limits.

Keys:
    temper:response:{owner}:{id}    hash: status, body, items, background, reason, beat, schema; of a document also
                                    revision, which changes with it, and tags, which lists are filtered by
    temper:responses:index          sorted set of these keys by the time at which they expire
    temper:responses:sizes          hash: key → bytes
    temper:responses:bytes          their sum
    temper:responses:owners         hash: owner → the sum of its own; those without an owner are not counted here
    temper:responses:index:{owner}  sorted set of an owner's keys
    temper:responses:chats:{owner}  sorted set of the ids of its stored chats by the time at which they were made

``owner`` is a digest of the response's owner, empty without API keys: nobody can name the response of someone else.
``status`` and ``reason`` count where the body says something else: a gateway that cancels a response, or finds it lost,
changes it without having its body. All responses together have at most so many bytes, and so have those of one owner:
nobody pushes out what others keep. The ones that expire first make room. Redis holds the jobs as well, which are worth
more.

A background response that has not ended has heartbeats: every second its gateway says that it still runs the response,
and learns whether the response is still wanted. A gateway that finds one without a heartbeat for longer than the lease
stores that it failed. Times are Redis's.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import structlog
from pydantic_core import from_json, to_json

from services.common.errors import InvalidRequest, NotFound, PayloadTooLarge, Unavailable
from services.common.storage.record_versions import RESPONSE
from services.common.storage.redis import call_async, connect_async
from services.gateway.api.responses.response_object import Record, cut_call, missing, parsed, response_of
from services.gateway.api.responses.to_chat import dotted
from services.gateway.protocol.responses.items import InputItem, Item, ItemReference
from services.gateway.settings import GatewaySettings

INDEX = "temper:responses:index"
SIZES = "temper:responses:sizes"
BYTES = "temper:responses:bytes"
OWNERS = "temper:responses:owners"
CHATS = "temper:responses:chats"
LOST = "the gateway that ran this background response was lost"

_PRELUDE = f"""
local function now()
  local t = redis.call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1e6
end
local function owner_of(key)
  return string.match(key, '^temper:response:([^:]*):')
end
local function list_of(key)
  local id = string.match(key, ':(chatcmpl[^:]*)$')
  return id and '{CHATS}:' .. owner_of(key), id
end
local function newer(key)
  return (tonumber(redis.call('HGET', key, 'schema') or '1') or 0) > {RESPONSE.version}
end
local function unlist(key)
  local size, owner = redis.call('HGET', '{SIZES}', key), owner_of(key)
  local list, id = list_of(key)
  if list then redis.call('ZREM', list, id) end
  if size then
    redis.call('DECRBY', '{BYTES}', size)
    redis.call('HDEL', '{SIZES}', key)
  end
  redis.call('ZREM', '{INDEX}', key)
  if owner ~= '' and redis.call('ZREM', '{INDEX}:' .. owner, key) == 1 then
    if redis.call('HINCRBY', '{OWNERS}', owner, -(size or 0)) <= 0 then redis.call('HDEL', '{OWNERS}', owner) end
  end
end
local function drop(key)
  unlist(key)
  return redis.call('DEL', key)
end
local function active(key)
  local status = redis.call('HGET', key, 'status')
  return status == 'queued' or status == 'in_progress'
end
local function lose(key, lease)
  if active(key) and not newer(key) and now() - tonumber(redis.call('HGET', key, 'beat')) > lease then
    redis.call('HSET', key, 'status', 'failed', 'reason', '{LOST}')
  end
end
"""
_SAVE = (
    _PRELUDE
    + f"""
-- KEYS record; ARGV ttl limit size status body items background only_active owner_limit revision tags only_revision
if ARGV[8] == '1' and not active(KEYS[1]) then return 0 end
if newer(KEYS[1]) then return 0 end
if ARGV[12] ~= '' and redis.call('HGET', KEYS[1], 'revision') ~= ARGV[12] then return 0 end
local limit, size, owner = tonumber(ARGV[2]), tonumber(ARGV[3]), owner_of(KEYS[1])
local list, id = list_of(KEYS[1])
local made = list and redis.call('ZSCORE', list, id) or now()
-- Fields that this release does not know stay.
unlist(KEYS[1])
redis.call('HDEL', KEYS[1], 'reason')
while owner ~= '' and tonumber(redis.call('HGET', '{OWNERS}', owner) or '0') + size > tonumber(ARGV[9]) do
  local oldest = redis.call('ZRANGE', '{INDEX}:' .. owner, 0, 0)[1]
  if not oldest then break end
  drop(oldest)
end
for _, key in ipairs(redis.call('ZRANGEBYSCORE', '{INDEX}', '-inf', now(), 'LIMIT', 0, 256)) do drop(key) end
while tonumber(redis.call('GET', '{BYTES}') or '0') + size > limit do
  local oldest = redis.call('ZRANGE', '{INDEX}', 0, 0)[1]
  if not oldest then break end
  drop(oldest)
end
redis.call('HSET', KEYS[1], 'status', ARGV[4], 'body', ARGV[5], 'items', ARGV[6], 'background', ARGV[7], 'beat', now(),
  'schema', {RESPONSE.version})
if ARGV[10] ~= '' then redis.call('HSET', KEYS[1], 'revision', ARGV[10], 'tags', ARGV[11]) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
if list then redis.call('ZADD', list, made, id) end
local ends = now() + tonumber(ARGV[1])
redis.call('ZADD', '{INDEX}', ends, KEYS[1])
if owner ~= '' then
  redis.call('ZADD', '{INDEX}:' .. owner, ends, KEYS[1])
  redis.call('HINCRBY', '{OWNERS}', owner, size)
end
redis.call('HSET', '{SIZES}', KEYS[1], size)
redis.call('INCRBY', '{BYTES}', size)
return 1
"""
)
_LOAD = (
    _PRELUDE
    + """
-- KEYS record; ARGV lease
lose(KEYS[1], tonumber(ARGV[1]))
return redis.call('HMGET', KEYS[1], 'status', 'body', 'items', 'reason', 'schema')
"""
)
_CANCEL = (
    _PRELUDE
    + """
-- KEYS record; ARGV lease
if redis.call('EXISTS', KEYS[1]) == 0 then return 'MISSING' end
if redis.call('HGET', KEYS[1], 'background') ~= '1' then return 'FOREGROUND' end
lose(KEYS[1], tonumber(ARGV[1]))
if active(KEYS[1]) and not newer(KEYS[1]) then redis.call('HSET', KEYS[1], 'status', 'cancelled') end
return 'OK'
"""
)
_DELETE = _PRELUDE + "-- KEYS record\nreturn drop(KEYS[1])\n"
_BEAT = (
    _PRELUDE
    + """
-- KEYS records; ARGV their statuses
local wanted = {}
for i, key in ipairs(KEYS) do
  wanted[i] = 0
  if active(key) then
    redis.call('HSET', key, 'beat', now(), 'status', ARGV[i])
    wanted[i] = 1
  end
end
return wanted
"""
)


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a response in the store."""

    owner: str
    """Owner of the response; empty: there are no API keys."""
    id: str

    @property
    def key(self) -> str:
        return f"temper:response:{self._digest}:{self.id}"

    @property
    def chats(self) -> str:
        """Key of the list of the owner's chats."""
        return f"{CHATS}:{self._digest}"

    @property
    def _digest(self) -> str:
        return hashlib.sha256(self.owner.encode()).hexdigest()[:32] if self.owner else ""


class ResponseStore:
    """Store of responses. For one asyncio loop; every method may raise Unavailable."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self.redis = connect_async(settings)
        self._save = self.redis.register_script(_SAVE)
        self._load = self.redis.register_script(_LOAD)
        self._cancel = self.redis.register_script(_CANCEL)
        self._delete = self.redis.register_script(_DELETE)
        self._beat = self.redis.register_script(_BEAT)

    def largest_of(self, owner: str) -> int:
        """Largest size of a response of an owner that can be kept, in bytes; 0: none can."""
        settings = self._settings
        own = settings.responses_key_max_bytes if owner else settings.responses_max_bytes
        return min(settings.response_max_bytes, settings.responses_max_bytes, own)

    async def aclose(self) -> None:
        await self.redis.aclose()

    async def save(self, place: Place, record: Record, *, only_active: bool = False) -> bool:
        """Keeps a response, in place of what is there.

        Args:
            only_active: only if it is there and has not ended.

        Returns:
            True if it was written.

        Raises:
            PayloadTooLarge: it is over the limit for one response.
        """
        texts = [to_json(part) for part in (record.response, record.items)]
        size, largest = sum(map(len, texts)), self.largest_of(place.owner)
        if size > largest:
            raise PayloadTooLarge(
                f"the response and what it was given have {size} bytes, and {largest} can be kept: send "
                "store=false and no background, or less",
                param="input",
            )
        return await self.put(
            place, record.status, texts, background=bool(record.response["background"]), only_active=only_active
        )

    async def put(
        self,
        place: Place,
        status: str,
        texts: Sequence[bytes],
        *,
        background: bool = False,
        only_active: bool = False,
        revision: str = "",
        tags: bytes = b"",
        replaces: str = "",
    ) -> bool:
        """Writes body and items of a response or a document; True if that was done.

        Args:
            revision, tags: of a document.
            replaces: write only over this revision.
        """
        settings = self._settings
        size = sum(map(len, texts)) + len(tags)
        args: list[str | bytes] = [str(settings.responses_ttl_seconds), str(settings.responses_max_bytes), str(size)]
        args += [status, *texts, str(int(background)), str(int(only_active)), str(settings.responses_key_max_bytes)]
        args += [revision, tags, replaces]
        return bool(await call_async(lambda: self._save(keys=[place.key], args=args)))

    async def load(self, place: Place, *, param: str = "response_id") -> Record:
        """Stored response. Raises NotFound, which names ``param``."""
        lease = str(self._settings.response_lease_seconds)
        reply: Any = await call_async(lambda: self._load(keys=[place.key], args=[lease]))
        status, body, items, reason, schema = reply
        if body is None:
            raise missing(place.id, param=param)
        RESPONSE.check(schema, f"response {place.id}")
        response = from_json(cast(str, body))
        response["status"] = status
        if reason is not None:
            response["error"] = {"code": "server_error", "message": reason}
        return Record(response, from_json(cast(str, items)))

    async def cancel(self, place: Place) -> Record:
        """Ends a background response; one that has ended stays as it is.

        Raises:
            NotFound: there is none.
            InvalidRequest: it is not a background response.
        """
        lease = str(self._settings.response_lease_seconds)
        answer = await call_async(lambda: self._cancel(keys=[place.key], args=[lease]))
        if answer == "MISSING":
            raise missing(place.id)
        if answer == "FOREGROUND":
            raise InvalidRequest(
                f"response {place.id} was not made with background=true: close its connection to end it",
                param="response_id",
            )
        return await self.load(place)

    async def delete(self, place: Place) -> None:
        """Deletes a response; one that runs in the background ends.

        Raises:
            NotFound: there is none.
        """
        if not await self.drop(place):
            raise missing(place.id)

    async def drop(self, place: Place) -> bool:
        """Deletes what is kept in a place; True if there was something."""
        return bool(await call_async(lambda: self._delete(keys=[place.key])))

    async def beat(self, running: Sequence[tuple[Place, str]]) -> list[bool]:
        """Stores heartbeats of running responses, with their statuses. For each, True if it is still wanted."""
        keys, statuses = [place.key for place, _ in running], [status for _, status in running]
        reply: Any = await call_async(lambda: self._beat(keys=keys, args=statuses))
        return [bool(wanted) for wanted in reply]


log = structlog.get_logger(__name__)

_PAUSE_SECONDS = 5.0


class BestEffortStore:
    """Best-effort storage of responses: what cannot be stored is answered all the same.

    Args:
        store: of responses.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._away_until = 0.0

    async def keep(self, place: Place, record: Record) -> None:
        """Stores a response and says in its `store` whether that was done. When the store does not answer, it is left
        alone for a while, so that clients do not wait for it one after the other."""
        response = record.response
        if response["store"]:
            response["store"] = await self.tried(place, lambda: self._store.save(place, record))

    async def tried(self, place: Place, save: Callable[[], Awaitable[bool]]) -> bool:
        """Stores something by the same rule; True if that was done."""
        if self._store.largest_of(place.owner) == 0 or time.monotonic() < self._away_until:
            return False
        try:
            return await save()
        except (Unavailable, PayloadTooLarge) as error:
            log.warning("a response is not stored", response=place.id, error=error.message)
            if isinstance(error, Unavailable):
                self._away_until = time.monotonic() + _PAUSE_SECONDS
            return False


async def resolved(
    store: ResponseStore, owner: str, given: str | Sequence[InputItem], *, field: str = "input"
) -> str | list[Item | None]:
    """Input of a request, with every reference replaced by the item that it names. None is in the place of a call that
    was cut off, which can be neither run nor read.

    Args:
        store: of responses.
        owner: of the request; only the owner's responses are found.
        given: the input.
        field: of the request that has the input.

    Raises:
        NotFound: an item is not kept.
        Unavailable: Redis is away.
    """
    if isinstance(given, str):
        return given
    records: dict[str, Record] = {}
    items: list[Item | None] = []
    for index, item in enumerate(given):
        if not isinstance(item, ItemReference):
            items.append(item)
            continue
        param = dotted((field, index, "id"))
        response = response_of(item.id)
        try:
            if response is not None and response not in records:
                records[response] = await store.load(Place(owner, response), param=param)
        except NotFound as error:
            raise _missing(item.id, param) from error
        found = None if response is None else records[response].item(item.id)
        if found is None:
            raise _missing(item.id, param)
        items.append(None if cut_call(found) else parsed([found])[0])
    return items


def _missing(item_id: str, param: str) -> NotFound:
    return NotFound(
        f"{param}: no such item: {item_id[:80]!r}; items are kept with their response, for a while only, and with "
        "store=true only: send the item itself",
        param=param,
    )
