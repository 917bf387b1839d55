"""Store of canaries in Redis: what runs, how it stands, how it ended.

Keys:
    temper:canaries:{id}            hash: new (as it began), candidate, key, state, began, ended, looked, evidence,
                                    decision, schema
    temper:canaries:{id}:counts     hash: gateway → what it has counted (services/learning/canaries/answers.py)
    temper:canaries:{id}:sessions   set of marks of sessions that had an answer, until the canary ends
    temper:canaries:all             sorted set of ids, which sort by time
    temper:canaries:running         hash: adapter → what gateways need of its canary, until that has ended

Looks and ends of a controller carry the fence of the lease `canaries` and are refused once another one holds it.
Gateways are told of a canary only while somebody looks at it: without guardrails there are no candidates. Every script
may be repeated when its answer got lost. Times are Redis's.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import structlog

from services.common.errors import Conflict, NewerSchema, NotFound
from services.common.settings import CommonSettings
from services.common.storage.lease import FENCED, Lease, LeaseLost, fence_key
from services.common.storage.outbox import NOTIFY
from services.common.storage.record_versions import CANARY, PassOver, passing_over
from services.common.storage.redis import NOW, call_async, connect_async, ids_before, read_hashes
from services.common.validation.strict_models import StrictModel
from services.learning.canaries.record import CanaryEvidence, CanaryRecord, Decision, NewCanary, Outcome, State

ROOT: Final = "temper:canaries:"
LEASE: Final = "canaries"
LEASE_SECONDS: Final = 3.0
UNWATCHED_SECONDS: Final = 10.0
"""Time without a look after which a candidate answers nobody."""
_ALL, _RUNNING = f"{ROOT}all", f"{ROOT}running"
_FIELDS = ("new", "key", "state", "began", "ended", "evidence", "decision", "schema")
_PAGE = 100
_KEPT = 1000
"""Canaries that are remembered once they have ended."""
_KEY_BYTES = 16
_MOST_SESSIONS = 200_000
"""Sessions of a canary that are remembered."""
_AT_ONCE = 1000

_PRELUDE = f"{NOW}{NOTIFY}local ROOT = '{ROOT}'\n"
_TELL: Final = """
local function tell_end(id, adapter, state)
  local candidate = redis.call('HGET', ROOT .. id, 'candidate')
  notify('canary.' .. state, {id = id, adapter = adapter, candidate = candidate, state = state})
end
"""
_BEGIN = (
    _PRELUDE
    + f"""
-- ARGV id adapter candidate new key route attached
local hash = ROOT .. ARGV[1]
local known = redis.call('HGET', hash, 'candidate')
if known then return known == ARGV[3] and {{'OK'}} or {{'OTHER'}} end
local running = redis.call('HGET', ROOT .. 'running', ARGV[2])
if running then return {{'RUNNING', running}} end
if ARGV[7] == '1' then
  for _, route in ipairs(redis.call('HVALS', ROOT .. 'running')) do
    if cjson.decode(route).attached then return {{'RUNNING', route}} end
  end
end
local t = now()
redis.call('HSET', hash, 'candidate', ARGV[3], 'new', ARGV[4], 'key', ARGV[5], 'state', 'running', 'began', t,
  'looked', t, 'schema', {CANARY.version})
redis.call('ZADD', ROOT .. 'all', 0, ARGV[1])
redis.call('HSET', ROOT .. 'running', ARGV[2], ARGV[6])
if redis.call('ZCARD', ROOT .. 'all') > {_KEPT} then
  for _, old in ipairs(redis.call('ZRANGE', ROOT .. 'all', 0, 9)) do
    local state = redis.call('HGET', ROOT .. old, 'state')
    local known = (tonumber(redis.call('HGET', ROOT .. old, 'schema') or '1') or 0) <= {CANARY.version}
    if known and state ~= 'running' and state ~= 'promoting' then
      redis.call('DEL', ROOT .. old, ROOT .. old .. ':counts')
      redis.call('ZREM', ROOT .. 'all', old)
    end
  end
end
return {{'OK'}}
"""
)
_LOOKED = (
    _PRELUDE
    + FENCED
    + """
-- KEYS fence; ARGV id fence evidence
if fenced(KEYS[1], ARGV[2]) then return 'FENCED' end
if redis.call('HGET', ROOT .. ARGV[1], 'state') == 'running' then
  redis.call('HSET', ROOT .. ARGV[1], 'looked', now(), 'evidence', ARGV[3])
end
return 'OK'
"""
)
_DECIDE = (
    _PRELUDE
    + FENCED
    + _TELL
    + """
-- KEYS fence; ARGV id adapter fence decision state evidence; no fence: a person decides
local hash = ROOT .. ARGV[1]
local state = redis.call('HGET', hash, 'state')
if not state then return 'MISSING' end
if ARGV[3] ~= '' and fenced(KEYS[1], ARGV[3]) then return 'FENCED' end
if redis.call('HGET', hash, 'decision') == ARGV[4] then return 'OK' end
if state ~= 'running' then return state end
redis.call('HSET', hash, 'decision', ARGV[4], 'state', ARGV[5])
if ARGV[6] ~= '' then redis.call('HSET', hash, 'evidence', ARGV[6]) end
if ARGV[5] ~= 'promoting' then
  redis.call('HSET', hash, 'ended', now())
  redis.call('HDEL', ROOT .. 'running', ARGV[2])
  redis.call('DEL', hash .. ':sessions')
  tell_end(ARGV[1], ARGV[2], ARGV[5])
end
return 'OK'
"""
)
_FINISH = (
    _PRELUDE
    + FENCED
    + _TELL
    + """
-- KEYS fence; ARGV id adapter fence state decision
local hash = ROOT .. ARGV[1]
if fenced(KEYS[1], ARGV[3]) then return 'FENCED' end
local state = redis.call('HGET', hash, 'state')
if state == ARGV[4] then return 'OK' end
if state ~= 'promoting' then return state or 'MISSING' end
redis.call('HSET', hash, 'state', ARGV[4], 'ended', now())
if ARGV[5] ~= '' then redis.call('HSET', hash, 'decision', ARGV[5]) end
redis.call('HDEL', ROOT .. 'running', ARGV[2])
redis.call('DEL', hash .. ':sessions')
tell_end(ARGV[1], ARGV[2], ARGV[4])
return 'OK'
"""
)
_ANSWERED = (
    _PRELUDE
    + f"""
-- ARGV id marks...
local hash = ROOT .. ARGV[1]
if redis.call('HGET', hash, 'state') ~= 'running' then return 0 end
local room = {_MOST_SESSIONS} - redis.call('SCARD', hash .. ':sessions')
for i = 2, math.min(#ARGV, room + 1) do redis.call('SADD', hash .. ':sessions', ARGV[i]) end
return 1
"""
)
_ROUTES = (
    _PRELUDE
    + """
local found, t = {}, tonumber(now())
for _, route in ipairs(redis.call('HVALS', ROOT .. 'running')) do
  local looked = redis.call('HGET', ROOT .. cjson.decode(route).id, 'looked')
  found[#found + 1] = route
  found[#found + 1] = string.format('%.3f', t - tonumber(looked or '0'))
end
return found
"""
)


log = structlog.get_logger("canaries")
Records: TypeAlias = list[CanaryRecord]
_STATES: Mapping[Outcome, State] = {"promote": "promoting", "roll_back": "rolled_back", "supersede": "superseded"}


class Route(StrictModel):
    """What a gateway needs of a canary to send requests its way."""

    id: str
    adapter: str
    current: str
    """"name@n", or "base"."""
    candidate: str
    share: float
    attached: bool
    """True if requests for the base model's name take part."""
    key: str
    refusals: tuple[str, ...] = ()
    """Openings of answers that refuse."""


@dataclass(frozen=True, slots=True)
class CanaryFilter:
    """Choice of canaries. ``owner`` None: of everybody."""

    owner: str | None = None
    adapter: str | None = None
    state: State | None = None

    def takes(self, record: CanaryRecord) -> bool:
        """True if the record is among them."""
        return (
            self.owner in (None, record.owner)
            and self.adapter in (None, record.adapter)
            and self.state in (None, record.state)
        )


class CanaryStore:
    """Store of canaries. For one asyncio loop; every method may raise Unavailable."""

    def __init__(self, settings: CommonSettings) -> None:
        self._redis = connect_async(settings)
        self._begin, self._looked, self._decide, self._finish, self._routes, self._answered = map(
            self._redis.register_script, (_BEGIN, _LOOKED, _DECIDE, _FINISH, _ROUTES, _ANSWERED)
        )

    async def aclose(self) -> None:
        await self._redis.aclose()

    def lease(self, seconds: float = LEASE_SECONDS) -> Lease:
        """Lease of the one who watches over all canaries."""
        return Lease(self._redis, LEASE, seconds=seconds)

    # Reading.

    async def get(self, canary_id: str) -> CanaryRecord:
        """Raises NotFound."""
        (found,) = await self._read([canary_id])
        if found is None:
            raise missing(canary_id)
        return found

    async def list(
        self, wanted: CanaryFilter, *, limit: int, after: str | None = None, pass_over: PassOver | None = None
    ) -> Records:
        """Canaries, newest first, from behind ``after`` on. Raises NewerSchema without ``pass_over``."""
        found: Records = []
        async for record in self._each(wanted, after, pass_over):
            found.append(record)
            if len(found) == limit:
                break
        return found

    async def running(self) -> Records:
        """Canaries that have not ended. One that this release cannot read is left out, so that it does not hold up
        others; nobody looks at it then, and its candidate answers nobody."""
        routes = await call_async(lambda: cast(Awaitable[Any], self._redis.hvals(_RUNNING)))
        ids = [json.loads(one)["id"] for one in routes]
        found = []
        for one, values in zip(ids, await self._fields(ids), strict=True):
            try:
                found.append(_record(one, values))
            except NewerSchema as error:
                log.warning("canary.unreadable", canary=one, error=error.message)
        return [one for one in found if one is not None and not one.ended]

    async def routes(self) -> Mapping[Route, float]:
        """What gateways need of the canaries that run, each with the seconds since the last look at it."""
        found: Any = await call_async(lambda: self._routes(keys=[], args=[]))
        routes = {}
        for text, age in zip(found[::2], found[1::2], strict=True):
            with suppress(NewerSchema):  # of a later release; `running` tells of it, once a look
                routes[_route(text)] = float(age)
        return routes

    async def now(self) -> float:
        """Redis's time, unix seconds."""
        seconds, micros = await call_async(lambda: cast(Awaitable[Any], self._redis.time()))
        return int(seconds) + int(micros) / 1e6

    async def counts(self, canary_id: str) -> Mapping[str, str]:
        """What each gateway has counted."""
        found: Any = await call_async(lambda: cast(Awaitable[Any], self._redis.hgetall(f"{ROOT}{canary_id}:counts")))
        return cast(Mapping[str, str], found)

    # Writing.

    async def begin(self, new: NewCanary) -> CanaryRecord:
        """Begins a canary, or returns the one that has begun with this id.

        Raises:
            Conflict: the adapter has a canary already, or the id is that of another one.
        """
        key = secrets.token_hex(_KEY_BYTES)
        route = Route(
            id=new.id,
            adapter=new.adapter,
            current=new.current,
            candidate=new.candidate,
            share=new.policy.share,
            attached=new.attached,
            key=key,
            refusals=tuple(new.policy.refusals),
        )
        args: list[str | int] = [
            new.id,
            new.adapter,
            new.candidate,
            new.model_dump_json(),
            key,
            route.model_dump_json(),
            int(new.attached),
        ]
        outcome, *other = await call_async(lambda: self._begin(keys=[], args=args))
        if outcome == "RUNNING":
            running = _route(other[0])
            whose = f"adapter {new.adapter!r}" if running.adapter == new.adapter else "the base model's name"
            raise Conflict(
                f"{whose} has the canary {running.id}, and never two: decide that one first, or wait for its end",
                param="adapter",
            )
        if outcome == "OTHER":
            raise Conflict(f"{new.id} is another canary, which began before", param="id")
        return await self.get(new.id)

    async def count(self, canary_id: str, gateway: str, counted: str) -> None:
        """Keeps all that a gateway has counted so far."""
        if await call_async(lambda: cast(Awaitable[Any], self._redis.exists(ROOT + canary_id))):
            await call_async(
                lambda: cast(Awaitable[Any], self._redis.hset(f"{ROOT}{canary_id}:counts", gateway, counted))
            )

    async def answered(self, canary_id: str, sessions: Sequence[str]) -> None:
        """Remembers that sessions had an answer of a canary that runs."""
        for start in range(0, len(sessions), _AT_ONCE):
            args = [canary_id, *sessions[start : start + _AT_ONCE]]
            await call_async(lambda: self._answered(keys=[], args=args))  # noqa: B023  (called at once)

    async def sessions(self, canary_id: str, of: Sequence[str]) -> frozenset[str]:
        """Those of the sessions that had an answer of a canary."""
        found: set[str] = set()
        for start in range(0, len(of), _AT_ONCE):
            part = list(of[start : start + _AT_ONCE])
            key = f"{ROOT}{canary_id}:sessions"
            known: Any = await call_async(lambda: cast(Awaitable[Any], self._redis.smismember(key, part)))  # noqa: B023
            found.update(one for one, is_there in zip(part, known, strict=True) if is_there)
        return frozenset(found)

    async def looked(self, canary_id: str, evidence: CanaryEvidence, *, fence: int) -> None:
        """Keeps what is known of a canary that runs. Raises LeaseLost."""
        args: list[str | int] = [canary_id, fence, evidence.model_dump_json()]
        _check(await call_async(lambda: self._looked(keys=[fence_key(LEASE)], args=args)), canary_id)

    async def decide(
        self,
        record: CanaryRecord,
        decision: Decision,
        *,
        evidence: CanaryEvidence | None = None,
        fence: int | None = None,
    ) -> CanaryRecord:
        """Ends a canary that runs; one that is promoted ends with `finish`, once the pointers have moved.

        Args:
            evidence: of the decision; None: the last look.
            fence: of the controller; None: a person decides.

        Raises:
            NotFound: there is none.
            Conflict: it was decided otherwise.
            LeaseLost: another controller has taken over.
        """
        state = _STATES[decision.outcome]
        said = "" if evidence is None else evidence.model_dump_json()
        args: list[str | int] = [
            record.id,
            record.adapter,
            "" if fence is None else fence,
            decision.model_dump_json(),
            state,
            said,
        ]
        _check(await call_async(lambda: self._decide(keys=[fence_key(LEASE)], args=args)), record.id)
        return await self.get(record.id)

    async def finish(self, record: CanaryRecord, *, fence: int, instead: Decision | None = None) -> CanaryRecord:
        """Ends a canary that is being promoted: as promoted, or as superseded because of ``instead``.

        Raises:
            Conflict: it is not being promoted.
            LeaseLost: another controller has taken over.
        """
        state: State = "promoted" if instead is None else "superseded"
        said = "" if instead is None else instead.model_dump_json()
        args: list[str | int] = [record.id, record.adapter, fence, state, said]
        _check(await call_async(lambda: self._finish(keys=[fence_key(LEASE)], args=args)), record.id)
        return await self.get(record.id)

    # Parts.

    async def _each(
        self, wanted: CanaryFilter, after: str | None, pass_over: PassOver | None
    ) -> AsyncIterator[CanaryRecord]:
        while True:
            ids = await ids_before(self._redis, _ALL, after, _PAGE)
            if not ids:
                return
            after = ids[-1]
            for one, values in zip(ids, await self._fields(ids), strict=True):
                record = None
                with passing_over(pass_over, one, None):
                    record = _record(one, values)
                if record is not None and wanted.takes(record):
                    yield record

    async def _read(self, ids: Sequence[str]) -> Sequence[CanaryRecord | None]:
        return [_record(one, values) for one, values in zip(ids, await self._fields(ids), strict=True)]

    async def _fields(self, ids: Sequence[str]) -> Sequence[Sequence[Any]]:
        return await read_hashes(self._redis, [ROOT + one for one in ids], _FIELDS)


def missing(canary_id: str) -> NotFound:
    """The error for an id that no canary has."""
    return NotFound(f"no such canary: {canary_id[:80]!r}", param="id")


def _route(text: str) -> Route:
    with CANARY.reading(f"the route of canary {json.loads(text).get('id')}"):
        return Route.model_validate_json(text)


def _record(canary_id: str, values: Sequence[Any]) -> CanaryRecord | None:
    new, key, state, began, ended, evidence, decision, schema = values
    if new is None:
        return None
    CANARY.check(schema, canary_id)
    with CANARY.reading(canary_id):
        begun = NewCanary.model_validate_json(new)
        return CanaryRecord(
            **{name: getattr(begun, name) for name in NewCanary.model_fields},
            key=key,
            state=state,
            began_at=float(began),
            ended_at=None if ended is None else float(ended),
            evidence=None if evidence is None else CanaryEvidence.model_validate_json(evidence),
            decision=None if decision is None else Decision.model_validate_json(decision),
        )


def _check(outcome: str, canary_id: str) -> None:
    """Raises what a script's outcome means."""
    if outcome == "MISSING":
        raise missing(canary_id)
    if outcome == "FENCED":
        raise LeaseLost(f"another controller watches over canaries now: {canary_id} stays as it is")
    if outcome != "OK":
        said = {"promoting": "is being promoted", "rolled_back": "was rolled back"}.get(outcome, f"was {outcome}")
        raise Conflict(f"{canary_id} {said}, which does not change any more", param="id")
