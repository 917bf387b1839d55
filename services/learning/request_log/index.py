"""Index of the request log in Redis: in which line of which part a request is, and who sent it.

Keys:
    temper:request:{id}               "part offset length" of a request, by each id of its answer; expires
    temper:requests:{list}            sorted set of ids by the time at which they ended: "all", "owner:…", "user:…" and
                                      "session:…" with digests of the names
    temper:requests:whole             there while nothing was lost
    temper:requests:waiting           sorted set of parts that spools have and the object store has not, by the time at
                                      which a spool last said so
    temper:requests:erased            hash: who or what was erased, and when, for what is written later: a gateway may
                                      still hold requests in its spool

Everything here can be made again from the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from pydantic_core import to_json

from services.common.settings import CommonSettings
from services.common.storage.ids import key_of
from services.common.storage.redis import call, connect
from services.learning.request_log.parts import Line

_ONE: Final = "temper:request:"
_LISTS: Final = "temper:requests:"
_ERASED: Final = "temper:requests:erased"
_WHOLE: Final = "temper:requests:whole"
_WAITING: Final = "temper:requests:waiting"
_LOST_SECONDS = 600.0
"""Silence of a gateway after which what its spool had counts as lost together with it."""
_ERASED_SECONDS = 30 * 86400
"""Time for which a spool may lie around before it is written."""
_CHUNK = 500

_ADD = f"""
-- ARGV keep now part requests: JSON of {{id, offset, length, at, lists, also}}, because each argument costs the client
local keep, oldest = ARGV[1], tonumber(ARGV[2]) - tonumber(ARGV[1])
local touched = {{}}
for _, one in ipairs(cjson.decode(ARGV[4])) do
  local id, offset, length, at, lists, also = unpack(one)
  local place = string.format('%s %d %d', ARGV[3], offset, length)
  redis.call('SET', '{_ONE}' .. id, place, 'EX', keep)
  for _, other in ipairs(also) do redis.call('SET', '{_ONE}' .. other, place, 'EX', keep) end
  for _, list in ipairs(lists) do
    redis.call('ZADD', '{_LISTS}' .. list, at, id)
    touched[list] = true
  end
end
for list, _ in pairs(touched) do
  redis.call('ZREMRANGEBYSCORE', '{_LISTS}' .. list, '-inf', oldest)
  redis.call('EXPIRE', '{_LISTS}' .. list, keep)
end
return 1
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index says of one request."""

    id: str
    at: float
    """Unix seconds at which it ended."""
    owner: str
    user: str | None = None
    session: str | None = None
    also: Sequence[str] = ()

    @property
    def lists(self) -> Sequence[str]:
        """Lists that it stands in."""
        named = [("owner", self.owner), ("user", self.user), ("session", self.session)]
        return ["all", *(f"{kind}:{key_of(name)}" for kind, name in named if name is not None)]

    def erased_by(self, marks: Mapping[str, float]) -> bool:
        """True if one of the marks means it."""
        mine = [answer_mark(one) for one in (self.id, *self.also)]
        if self.user is not None:
            mine += user_marks(key_of(self.user), self.owner)
        return any(self.at <= marks.get(mark, 0.0) for mark in mine)


def answer_mark(answer_id: str) -> str:
    """Mark of one request that is erased, by an id of its answer or of a choice."""
    return f"id:{key_of(answer_id.partition(':')[0])}"


def user_mark(user: str, owner: str | None) -> str:
    """Mark of a user whose requests are erased: those that an API key sent, or all (None)."""
    return f"user:{'*' if owner is None else key_of(owner)}:{key_of(user)}"


def user_marks(user: str, owner: str) -> Sequence[str]:
    """The marks that mean a request: of a user, by the digest of its name, and the API key that sent it."""
    return f"user:*:{user}", f"user:{key_of(owner)}:{user}"


class RequestIndex:
    """The index. Thread-safe and blocking; every method may raise Unavailable.

    Args:
        settings: where Redis is.
        keep_seconds: age at which parts go, by whole days; an entry expires a little later.
    """

    def __init__(self, settings: CommonSettings, *, keep_seconds: int) -> None:
        self._redis = connect(settings)
        self._keep = keep_seconds + 2 * 86400
        self._add = self._redis.register_script(_ADD)

    def close(self) -> None:
        self._redis.close()

    def add(self, part: str, entries: Sequence[tuple[Entry, Line]], now: float) -> None:
        """Says where the requests of a part are."""
        for start in range(0, len(entries), _CHUNK):
            some = [
                (entry.id, line.offset, line.length, str(entry.at), entry.lists, entry.also)
                for entry, line in entries[start : start + _CHUNK]
            ]
            args = (self._keep, now, part, to_json(some))
            call(lambda: self._add(keys=[], args=args))  # noqa: B023  (called at once)

    def waits(self, part: str, now: float) -> None:
        """Says that a spool has a part which the object store has not. For whoever holds it, so that nobody hands it on
        meanwhile."""
        call(lambda: self._redis.zadd(_WAITING, {part: now}))

    def wait_still(self, parts: Sequence[str], now: float) -> None:
        """Says of parts that wait that their spool is still there."""
        if parts:
            call(lambda: self._redis.zadd(_WAITING, dict.fromkeys(parts, now), xx=True))

    def waits_no_longer(self, part: str) -> None:
        """Says that the object store has a part, and this index what is in it."""
        call(lambda: self._redis.zrem(_WAITING, part))

    def waiting(self, now: float) -> Sequence[str]:
        """Parts that wait in spools."""

        def read() -> Any:
            self._redis.zremrangebyscore(_WAITING, "-inf", now - _LOST_SECONDS)
            return self._redis.zrange(_WAITING, 0, -1)

        return [str(one) for one in call(read)]

    def is_whole(self) -> bool:
        """False: this Redis has lost what the index had, or never had any of it."""
        return bool(call(lambda: self._redis.exists(_WHOLE)))

    def mark_whole(self) -> None:
        """Says that all parts are in the index."""
        call(lambda: self._redis.set(_WHOLE, "1"))

    def find(self, ids: Sequence[str]) -> Mapping[str, Line]:
        """Places of the requests that these ids are of; unknown ones are left out. A choice's id ("…:1") is found."""
        if not ids:
            return {}
        keys = [_ONE + one.partition(":")[0] for one in ids]
        values = call(lambda: cast(list[str | None], self._redis.mget(keys)))
        return {one: Line.parse(place) for one, place in zip(ids, values, strict=True) if place is not None}

    def newest(self, name: str, *, limit: int, after: str | None = None) -> Sequence[str]:
        """Ids of a list, newest first, from behind ``after`` on; none, if that is not in it."""

        def read() -> Any:
            start = 0
            if after is not None:
                rank = cast(int | None, self._redis.zrevrank(_LISTS + name, after))
                if rank is None:
                    return []
                start = rank + 1
            return self._redis.zrange(_LISTS + name, start, start + limit - 1, desc=True)

        return [str(one) for one in call(read)]

    def count(self, name: str, since: float, until: float) -> int:
        """How many of a list ended between two times (unix seconds)."""
        return call(lambda: self._redis.zcount(_LISTS + name, since, f"({until}"))

    def remove(self, entries: Sequence[Entry]) -> None:
        """Forgets requests."""

        def remove() -> None:
            with self._redis.pipeline(transaction=False) as pipe:
                for entry in entries:
                    pipe.delete(*(_ONE + one for one in (entry.id, *entry.also)))
                    for name in entry.lists:
                        pipe.zrem(_LISTS + name, entry.id)
                pipe.execute()

        if entries:
            call(remove)

    def mark_erased(self, marks: Sequence[str], now: float) -> None:
        """Says that what is written later and bears one of the marks has to go."""
        if marks:

            def mark() -> None:
                with self._redis.pipeline(transaction=True) as pipe:
                    pipe.hset(_ERASED, mapping=dict.fromkeys(marks, f"{now:.3f}"))
                    pipe.expire(_ERASED, _ERASED_SECONDS)
                    pipe.execute()

            call(mark)

    def erased(self) -> Mapping[str, float]:
        """Marks, with the times (unix seconds) up to which they count."""
        found = call(lambda: cast(dict[str, str], self._redis.hgetall(_ERASED)))
        return {mark: float(at) for mark, at in found.items()}
