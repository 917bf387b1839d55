"""Store of feedback in Redis: one opinion of each user, source and answer, listed newest first.

Keys:
    temper:feedback:{id}                 hash: body, owner, made, changed, used, size, indexes, voice, schema
    temper:feedback:voice:{digest}       id of the newest opinion of one user and source of one answer of one owner
    temper:feedback:all                  sorted set of ids; those of an owner, of an answer and of a user have their own
    temper:feedback:bytes                sum of the sizes

Ids sort by time, so every sorted set is read by them alone. All feedback together has at most so many bytes, and none
is pushed out by new: what does not fit is refused. Feedback older than the retention goes, a few with each write. Times
are Redis's. Every script may be repeated when its answer got lost.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, cast

from services.common.errors import Conflict, NotFound, Unavailable
from services.common.settings import CommonSettings
from services.common.storage.ids import key_of, ulid
from services.common.storage.record_versions import FEEDBACK, PassOver, passing_over
from services.common.storage.redis import NOW, call_async, connect_async, ids_before, read_hashes
from services.learning.feedback.record import Feedback, FeedbackRecord

ROOT: Final = "temper:feedback:"
_ALL: Final = f"{ROOT}all"
_FIELDS = ("body", "owner", "made", "changed", "used", "schema")
_PAGE = 200
_BETWEEN = "\0"
"""Character that no name has."""
_SWEPT = 16
"""Most outdated opinions that one write removes."""

_PRELUDE = f"""{NOW}
local ROOT = '{ROOT}'
local function drop(id)
  local known = redis.call('HMGET', ROOT .. id, 'size', 'indexes', 'voice')
  if not known[1] then return 0 end
  for index in string.gmatch(known[2], '%S+') do redis.call('ZREM', ROOT .. index, id) end
  if redis.call('GET', ROOT .. known[3]) == id then redis.call('DEL', ROOT .. known[3]) end
  redis.call('DECRBY', ROOT .. 'bytes', known[1])
  return redis.call('DEL', ROOT .. id)
end
local function free(size, limit)
  return tonumber(redis.call('GET', ROOT .. 'bytes') or '0') + size <= limit
end
"""
_ADD = (
    _PRELUDE
    + f"""
-- ARGV id owner body size limit voice indexes oldest
local id, size = ARGV[1], tonumber(ARGV[4])
local outdated = redis.call('ZRANGEBYLEX', ROOT .. 'all', '-', '(' .. ARGV[8], 'LIMIT', 0, {_SWEPT})
for _, old in ipairs(outdated) do drop(old) end
if redis.call('EXISTS', ROOT .. id) == 1 then return {{'created', id}} end
local known = redis.call('GET', ROOT .. ARGV[6])
local was = known and redis.call('HMGET', ROOT .. known, 'body', 'used', 'size', 'schema') or {{}}
if (tonumber(was[4] or '1') or 0) > {FEEDBACK.version} then return {{'newer', known}} end
if was[1] == ARGV[3] then return {{'changed', known}} end
if was[1] and was[2] == '' then
  local before = tonumber(was[3])
  if not free(size - before, tonumber(ARGV[5])) then return {{'full', known}} end
  redis.call('INCRBY', ROOT .. 'bytes', size - before)
  redis.call('HSET', ROOT .. known, 'body', ARGV[3], 'size', size, 'changed', now(), 'schema', {FEEDBACK.version})
  return {{'changed', known}}
end
if not free(size, tonumber(ARGV[5])) then return {{'full', id}} end
local t = now()
redis.call('HSET', ROOT .. id, 'body', ARGV[3], 'owner', ARGV[2], 'made', t, 'changed', t, 'used', '', 'size', size,
  'indexes', ARGV[7], 'voice', ARGV[6], 'schema', {FEEDBACK.version})
for index in string.gmatch(ARGV[7], '%S+') do redis.call('ZADD', ROOT .. index, 0, id) end
redis.call('SET', ROOT .. ARGV[6], id)
redis.call('INCRBY', ROOT .. 'bytes', size)
return {{'created', id}}
"""
)
_REPLACE = (
    _PRELUDE
    + f"""
-- ARGV id body size limit voice
local known = redis.call('HMGET', ROOT .. ARGV[1], 'used', 'size', 'voice', 'body', 'schema')
if not known[1] then return 'MISSING' end
if (tonumber(known[5] or '1') or 0) > {FEEDBACK.version} then return 'NEWER' end
if known[4] == ARGV[2] then return 'OK' end
if known[1] ~= '' then return known[1] end
if known[3] ~= ARGV[5] then return 'OTHER' end
local more = tonumber(ARGV[3]) - tonumber(known[2])
if not free(more, tonumber(ARGV[4])) then return 'FULL' end
redis.call('INCRBY', ROOT .. 'bytes', more)
redis.call('HSET', ROOT .. ARGV[1], 'body', ARGV[2], 'size', ARGV[3], 'changed', now(), 'schema', {FEEDBACK.version})
return 'OK'
"""
)
_USE = (
    _PRELUDE
    + """
-- KEYS opinions; ARGV the data set
for _, key in ipairs(KEYS) do
  local used = redis.call('HGET', key, 'used')
  if used and not string.find(' ' .. used .. ' ', ' ' .. ARGV[1] .. ' ', 1, true) then
    redis.call('HSET', key, 'used', used == '' and ARGV[1] or used .. ' ' .. ARGV[1])
  end
end
return #KEYS
"""
)
_DROP = _PRELUDE + "-- ARGV ids\nlocal gone = 0\nfor _, id in ipairs(ARGV) do gone = gone + drop(id) end\nreturn gone\n"
Records: TypeAlias = list[FeedbackRecord]


@dataclass(frozen=True, slots=True)
class FeedbackFilter:
    """Choice of feedback: what all of it has in common. ``owner`` None: of everybody."""

    owner: str | None
    target: str | None = None
    user: str | None = None
    source: str | None = None
    label: str | None = None

    @property
    def index(self) -> str:
        """The shortest sorted set that has all of it."""
        if self.target is not None:
            return ROOT + _target_index(self.target)
        if self.user is not None:
            return ROOT + _user_index(self.user)
        return _ALL if self.owner is None else ROOT + _owner_index(self.owner)

    def takes(self, record: FeedbackRecord) -> bool:
        """True if the record is among it."""
        said = record.said
        return (
            self.owner in (None, record.owner)
            and self.target in (None, said.target, *said.answers)
            and self.user in (None, said.user)
            and self.source in (None, said.source)
            and self.label in (None, said.label)
        )


class FeedbackStore:
    """Store of feedback. For one asyncio loop; every method may raise Unavailable.

    Args:
        settings: where Redis is.
        max_bytes: of all feedback together.
        keep_seconds: age at which feedback goes.
    """

    def __init__(self, settings: CommonSettings, *, max_bytes: int, keep_seconds: float) -> None:
        self._redis = connect_async(settings)
        self._max_bytes = max_bytes
        self._keep_seconds = keep_seconds
        self._add, self._replace, self._use, self._drop = map(
            self._redis.register_script, (_ADD, _REPLACE, _USE, _DROP)
        )

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def add(self, owner: str, said: Feedback) -> tuple[FeedbackRecord, Literal["created", "changed"]]:
        """Keeps an opinion: a new one, or in the place of what the same user and source said of the same answer.

        One that is there already, word for word, stays as it is, also once a data set has used it: whoever does not
        know whether it was taken sends it again, and is not heard twice.

        Raises:
            Unavailable: there is no room.
        """
        made_id, body = f"fb_{ulid()}", said.model_dump_json(exclude_none=True)
        indexes = ["all", _owner_index(owner), *map(_target_index, dict.fromkeys((said.target, *said.answers)))]
        if said.user is not None:
            indexes.append(_user_index(said.user))
        oldest = f"fb_{ulid(int((time.time() - self._keep_seconds) * 1000), 0)}"
        args: list[str | int] = [
            made_id,
            owner,
            body,
            _size(body),
            self._max_bytes,
            _voice(owner, said),
            " ".join(indexes),
            oldest,
        ]
        outcome, kept = await call_async(lambda: self._add(keys=[], args=args))
        if outcome == "full":
            raise self._full()
        return await self.get(kept), outcome  # which refuses a "newer" one

    async def replace(self, record: FeedbackRecord, said: Feedback) -> FeedbackRecord:
        """Changes what an opinion says.

        Raises:
            NotFound: it was deleted meanwhile.
            Conflict: a data set has used it, or the new one is of another answer, source or user.
            Unavailable: there is no room.
        """
        body = said.model_dump_json(exclude_none=True)
        args: list[str | int] = [record.id, body, _size(body), self._max_bytes, _voice(record.owner, said)]
        outcome = await call_async(lambda: self._replace(keys=[], args=args))
        if outcome == "MISSING":
            raise missing(record.id)
        if outcome == "OTHER":
            raise Conflict(
                f"{record.id} is what {record.said.source} {record.said.user or 'without a name'} says of "
                f"{record.said.target}, which stays: delete it, and send another one",
                param="id",
            )
        if outcome == "FULL":
            raise self._full()
        if outcome not in ("OK", "NEWER"):
            raise Conflict(
                f"{record.id} was used by {outcome.replace(' ', ', ')}, which does not change any more: send a new "
                "opinion, which counts from now on, or delete this one",
                param="id",
            )
        return await self.get(record.id)

    async def get(self, feedback_id: str) -> FeedbackRecord:
        """Raises NotFound."""
        (found,) = await self._read([feedback_id])
        if found is None:
            raise missing(feedback_id)
        return found

    async def list(
        self, wanted: FeedbackFilter, *, limit: int, after: str | None = None, pass_over: PassOver | None = None
    ) -> Records:
        """Feedback, newest first, from behind ``after`` on.

        Args:
            pass_over: told of what a later release wrote, whatever else is asked for. None: it is an error.

        Raises:
            NewerSchema: there is something of a later release.
        """
        found: Records = []
        async for record in self.each(wanted, after=after, pass_over=pass_over):
            found.append(record)
            if len(found) == limit:
                break
        return found

    async def each(
        self, wanted: FeedbackFilter, *, after: str | None = None, pass_over: PassOver | None = None
    ) -> AsyncIterator[FeedbackRecord]:
        """All of it, newest first, from behind ``after`` on; what comes in meanwhile is left out. See ``list``."""
        while True:
            ids = await ids_before(self._redis, wanted.index, after, _PAGE)
            if not ids:
                return
            after = ids[-1]
            for one, values in zip(ids, await self._values(ids), strict=True):
                record = None
                with passing_over(pass_over, one, values[_FIELDS.index("owner")]):
                    record = _record(one, values)
                if record is not None and wanted.takes(record):
                    yield record

    async def count(self, wanted: FeedbackFilter, since: float, until: float) -> int:
        """Number of opinions that were first given between two times (unix seconds) at that index of the filter, which
        is cheap; what else the filter says does not count."""
        first, end = (f"fb_{ulid(max(0, int(at * 1000)), 0)}" for at in (since, until))
        return int(
            await call_async(lambda: cast(Awaitable[Any], self._redis.zlexcount(wanted.index, f"[{first}", f"({end}")))
        )

    async def mark_used(self, ids: Sequence[str], data_set: str) -> None:
        """Says that a data set ("name@version") has these opinions. Those that are gone stay so."""
        for start in range(0, len(ids), _PAGE):
            keys = [ROOT + one for one in ids[start : start + _PAGE]]
            await call_async(lambda: self._use(keys=keys, args=[data_set]))  # noqa: B023  (called at once)

    async def delete(self, ids: Sequence[str]) -> int:
        """Removes opinions, used ones too; returns how many there were."""
        return int(await call_async(lambda: self._drop(keys=[], args=list(ids)))) if ids else 0

    async def delete_all(self, wanted: FeedbackFilter) -> int:
        """Removes all of it; returns how much there was."""
        gone, waiting = 0, []
        async for record in self.each(wanted):
            waiting.append(record.id)
            if len(waiting) == _PAGE:
                gone += await self.delete(waiting)
                waiting = []
        return gone + await self.delete(waiting)

    async def _read(self, ids: Sequence[str]) -> Sequence[FeedbackRecord | None]:
        return [_record(one, values) for one, values in zip(ids, await self._values(ids), strict=True)]

    async def _values(self, ids: Sequence[str]) -> Sequence[Sequence[Any]]:
        return await read_hashes(self._redis, [ROOT + one for one in ids], _FIELDS)

    def _full(self) -> Unavailable:
        return Unavailable(
            f"feedback has taken all of its {self._max_bytes} bytes (TEMPER_FEEDBACK_MAX_BYTES): delete what is not "
            "needed, or allow more",
            retry_after=3600.0,
        )


def missing(feedback_id: str) -> NotFound:
    """The error for an id that no opinion has."""
    return NotFound(f"no such feedback: {feedback_id[:80]!r}", param="id")


def _record(feedback_id: str, values: Sequence[Any]) -> FeedbackRecord | None:
    body, owner, made, changed, used, schema = values
    if body is None:
        return None
    FEEDBACK.check(schema, feedback_id)
    with FEEDBACK.reading(feedback_id):
        return FeedbackRecord(
            id=feedback_id,
            owner=owner,
            said=Feedback.model_validate_json(body),
            created_at=float(made),
            changed_at=float(changed),
            used_by=tuple(used.split()),
        )


def _size(body: str) -> int:
    return len(body.encode())


def _owner_index(owner: str) -> str:
    return f"owner:{key_of(owner)}"


def _target_index(target: str) -> str:
    return f"target:{key_of(target)}"


def _user_index(user: str) -> str:
    return f"user:{key_of(user)}"


def _voice(owner: str, said: Feedback) -> str:
    parts = (owner, said.target, said.source, said.user or "")
    return f"voice:{key_of(_BETWEEN.join(parts))}"
