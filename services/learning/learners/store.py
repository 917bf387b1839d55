"""Store of learners in Redis: policies, where each stands, and what has happened.

Keys:
    temper:learners:{name}            hash: id, policy, revision, cycle, turn, owner, everybodys, made, changed, schema
    temper:learners:{id}:events       stream of what happened, the last ones
    temper:learners                   sorted set of names, in their order

Every write names the turn that it follows, and is refused if there was another one in between; a controller's carries
the fence of the lease `learners` as well. A state and its events are written at once. Every script may be repeated when
its answer got lost: a turn that has what it was to have is taken for its own. Times are Redis's.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import structlog

from services.common.errors import Conflict, NewerSchema, NotFound
from services.common.settings import CommonSettings
from services.common.storage.ids import ulid
from services.common.storage.lease import FENCED, Lease, LeaseLost, fence_key
from services.common.storage.outbox import NOTIFY
from services.common.storage.record_versions import LEARNER, PassOver
from services.common.storage.redis import NOW, call_async, connect_async, read_hashes
from services.learning.learners.policy import LearnerPolicy
from services.learning.learners.record import Cycle, Event, Learner, NewEvent

ROOT: Final = "temper:learners:"
LEASE: Final = "learners"
LEASE_SECONDS: Final = 10.0
_ALL: Final = "temper:learners"
_FIELDS = ("id", "policy", "revision", "turn", "cycle", "owner", "everybodys", "made", "changed", "schema")
_EVENTS = 2000
"""Events of a learner that are kept."""
_TRIES = 20

_PRELUDE = f"""{NOW}{NOTIFY}
local ROOT = '{ROOT}'
local ENDS = {{promoted = 1, rejected = 1, rolled_back = 1, superseded = 1, failed = 1}}
local function tell(id, events, name)
  for _, event in ipairs(cjson.decode(events)) do
    local said = cjson.decode(event)
    if ENDS[said.kind] then
      local candidate = said.evidence and said.evidence.candidate or nil
      notify('learner.' .. said.kind, {{id = id, learner = name, cycle = said.cycle, detail = said.detail,
        candidate = candidate}})
    end
    redis.call('XADD', ROOT .. id .. ':events', 'MAXLEN', '~', {_EVENTS}, '*', 'at', now(), 'event', event)
  end
end
"""
_CREATE = (
    _PRELUDE
    + f"""
-- KEYS names; ARGV name id policy cycle owner everybodys events
local hash = ROOT .. ARGV[1]
local id = redis.call('HGET', hash, 'id')
if id then return id == ARGV[2] and 'OK' or 'EXISTS' end
redis.call('HSET', hash, 'id', ARGV[2], 'policy', ARGV[3], 'revision', 1, 'turn', 1, 'cycle', ARGV[4], 'owner', ARGV[5],
  'everybodys', ARGV[6], 'made', now(), 'changed', now(), 'schema', {LEARNER.version})
redis.call('ZADD', KEYS[1], 0, ARGV[1])
tell(ARGV[2], ARGV[7], ARGV[1])
return 'OK'
"""
)
_WRITE = (
    _PRELUDE
    + FENCED
    + f"""
-- KEYS fence; ARGV name id turn fence cycle events policy; no fence: a person writes; no policy: it stays
local hash = ROOT .. ARGV[1]
local found = redis.call('HMGET', hash, 'id', 'turn', 'cycle', 'policy')
if found[1] ~= ARGV[2] then return 'MISSING' end
if ARGV[4] ~= '' and fenced(KEYS[1], ARGV[4]) then return 'FENCED' end
if found[2] ~= ARGV[3] then
  local mine = found[2] == tostring(tonumber(ARGV[3]) + 1) and found[3] == ARGV[5]
  return mine and (ARGV[7] == '' or found[4] == ARGV[7]) and 'OK' or 'TURN'
end
redis.call('HSET', hash, 'cycle', ARGV[5], 'turn', tonumber(ARGV[3]) + 1, 'schema', {LEARNER.version})
if ARGV[7] ~= '' then
  redis.call('HSET', hash, 'policy', ARGV[7], 'changed', now())
  redis.call('HINCRBY', hash, 'revision', 1)
end
tell(ARGV[2], ARGV[6], ARGV[1])
return 'OK'
"""
)
_DELETE = (
    _PRELUDE
    + """
-- KEYS names; ARGV name id
if redis.call('HGET', ROOT .. ARGV[1], 'id') ~= ARGV[2] then return 0 end
redis.call('DEL', ROOT .. ARGV[1], ROOT .. ARGV[2] .. ':events')
redis.call('ZREM', KEYS[1], ARGV[1])
return 1
"""
)
Learners: TypeAlias = list[Learner]
log = structlog.get_logger("learners")


@dataclass(frozen=True, slots=True)
class NewLearner:
    """A learner that is about to be made."""

    policy: LearnerPolicy
    key_id: str = ""
    everybodys: bool = False


class LearnerStore:
    """Store of learners. For one asyncio loop; every method may raise Unavailable."""

    def __init__(self, settings: CommonSettings) -> None:
        self._redis = connect_async(settings)
        self._create, self._write, self._delete = map(self._redis.register_script, (_CREATE, _WRITE, _DELETE))

    async def aclose(self) -> None:
        await self._redis.aclose()

    def lease(self, seconds: float = LEASE_SECONDS) -> Lease:
        """Lease of the one who acts for all learners."""
        return Lease(self._redis, LEASE, seconds=seconds)

    # Reading.

    async def get(self, name: str) -> Learner:
        """Raises NotFound."""
        (values,) = await self._fields([name])
        found = _learner(name, values)
        if found is None:
            raise missing(name)
        return found

    async def all(self, pass_over: PassOver | None = None) -> Learners:
        """Every learner, by name. One that this release cannot read is left out, so that it does not hold up others.

        Args:
            pass_over: told of those that a later release wrote; None: the log is.
        """
        names: Any = await call_async(lambda: cast(Awaitable[Any], self._redis.zrange(_ALL, 0, -1)))
        found = []
        for name, values in zip(names, await self._fields(names), strict=True):
            try:
                found.append(_learner(name, values))
            except (ValueError, NewerSchema) as error:
                if pass_over is not None and isinstance(error, NewerSchema):
                    pass_over(name, values[_FIELDS.index("owner")], error)
                    continue
                log.warning("learner.unreadable", learner=name, error=str(error)[:500])
        return [one for one in found if one is not None]

    async def events(self, learner: Learner, *, limit: int, after: str | None = None) -> list[Event]:
        """What happened, newest first, from before the event ``after`` on."""
        end = "+" if after is None else f"({after}"
        key = f"{ROOT}{learner.id}:events"
        found: Any = await call_async(
            lambda: cast(Awaitable[Any], self._redis.xrevrange(key, max=end, min="-", count=limit))
        )
        return [Event(id=entry, at=float(fields["at"]), **json.loads(fields["event"])) for entry, fields in found]

    # Writing.

    async def create(self, new: NewLearner, cycle: Cycle, *events: NewEvent) -> Learner:
        """Makes a learner. Raises Conflict: there is one of this name."""
        args: list[str] = [
            new.policy.name,
            f"learner_{ulid()}",
            _json(new.policy),
            cycle.model_dump_json(),
            new.key_id,
            "1" if new.everybodys else "",
            _told(events),
        ]
        if await call_async(lambda: self._create(keys=[_ALL], args=args)) != "OK":
            raise Conflict(f"learner {new.policy.name!r} exists: replace it (PUT), or delete it first", param="name")
        return await self.get(new.policy.name)

    async def write(
        self,
        learner: Learner,
        cycle: Cycle,
        events: Sequence[NewEvent] = (),
        *,
        policy: LearnerPolicy | None = None,
        fence: int | None = None,
    ) -> Learner:
        """Writes where a learner stands, behind the turn that was read, with what happened.

        Args:
            policy: another one; None: it stays.
            fence: of the controller; None: a person writes.

        Raises:
            NotFound: it was deleted meanwhile.
            Conflict: there was another write in between.
            LeaseLost: another controller has taken over.
        """
        args: list[str | int] = [
            learner.name,
            learner.id,
            learner.turn,
            "" if fence is None else fence,
            cycle.model_dump_json(),
            _told(events),
            "" if policy is None else _json(policy),
        ]
        outcome = await call_async(lambda: self._write(keys=[fence_key(LEASE)], args=args))
        if outcome == "MISSING":
            raise missing(learner.name)
        if outcome == "FENCED":
            raise LeaseLost(f"another controller acts for learners now: {learner.name} stays as it is")
        if outcome != "OK":
            raise Conflict(f"learner {learner.name!r} was changed meanwhile; retry", param="name")
        return await self.get(learner.name)

    async def change(
        self,
        name: str,
        change: Callable[[Learner], tuple[Cycle, Sequence[NewEvent]] | None],
        *,
        policy: LearnerPolicy | None = None,
    ) -> Learner:
        """Writes what a person wants of a learner as it stands then.

        Args:
            change: where it stands afterwards, and what happened; None: it stays as it is. May be called again.

        Raises:
            NotFound: there is none.
            Conflict: others write without end.
        """
        for _ in range(_TRIES):
            learner = await self.get(name)
            changed = change(learner)
            if changed is None:
                return learner
            try:
                return await self.write(learner, *changed, policy=policy)
            except Conflict:
                continue
        raise Conflict(f"learner {name!r} is being changed by others; retry", param="name")

    async def delete(self, learner: Learner) -> bool:
        """Removes a learner with its events; its data sets, jobs and versions stay. False: it was gone."""
        args = [learner.name, learner.id]
        return bool(await call_async(lambda: self._delete(keys=[_ALL], args=args)))

    async def _fields(self, names: Sequence[str]) -> Sequence[Sequence[Any]]:
        return await read_hashes(self._redis, [ROOT + name for name in names], _FIELDS)


def missing(name: str) -> NotFound:
    """The error for a name that no learner has."""
    return NotFound(f"learner {name[:80]!r} does not exist", param="name")


def _json(policy: LearnerPolicy) -> str:
    return policy.model_dump_json(exclude_unset=True)


def _told(events: Sequence[NewEvent]) -> str:
    return json.dumps([event.model_dump_json() for event in events])


def _learner(name: str, values: Sequence[Any]) -> Learner | None:
    learner_id, policy, revision, turn, cycle, owner, everybodys, made, changed, schema = values
    if learner_id is None:
        return None
    LEARNER.check(schema, f"learner {name}")
    with LEARNER.reading(f"learner {name}"):
        return Learner(
            id=learner_id,
            policy=LearnerPolicy.model_validate_json(policy),
            revision=int(revision),
            turn=int(turn),
            cycle=Cycle.model_validate_json(cycle),
            key_id=owner,
            everybodys=everybodys == "1",
            created_at=float(made),
            changed_at=float(changed),
        )
