"""Taking work off a Redis stream: claim, heartbeat, finish, hand back. Blocking; one class a kind of work.

Every write of an owner carries its fencing token; once another owner has claimed the job, or it was cancelled while
it waited, the write changes nothing and raises JobLost.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar

import redis
import structlog
from pydantic import TypeAdapter, ValidationError
from redis.commands.core import Script

from services.common.errors import TemperError
from services.common.jobs.record import JobState
from services.common.queue import scripts, steering_scripts
from services.common.queue.keyspace import Keyspace
from services.common.queue.records import text_sha
from services.common.settings import CommonSettings
from services.common.storage.record_versions import unknown_part
from services.common.storage.redis import BLOCK_SECONDS, call, connect
from services.common.telemetry import tracing

Asked: TypeAlias = Literal["OK", "CANCEL", "PAUSE"]
"""What a job's owner is asked to do: go on, cancel it, or hand it back for a pause."""
_REASON_LIMIT = 2000
_IN_ALL = 10
"""Attempts of a job in all, by those in a row: an engine that dies takes others' answers with it."""
_DEAD_CONSUMER_MS = 24 * 3600 * 1000


class Identified(Protocol):
    """A record of a job."""

    @property
    def id(self) -> str: ...


Record = TypeVar("Record", bound=Identified)
Spec = TypeVar("Spec")


class JobLost(TemperError):
    """Somebody else owns the job by now, or nobody: what this owner still does with it is void."""

    code = "job_lost"


@dataclass(frozen=True, slots=True)
class Claimed(Generic[Record, Spec]):
    """A job that this process may run until it finishes, hands it back or goes silent for too long."""

    job: Record
    spec: Spec
    fence: str
    attempt: int
    """Number of the attempt, from 1."""
    failures: int
    """Attempts before it since the job was last brought further for good."""
    entry: str
    spec_sha: str
    """Lower-case hex SHA-256 of the spec as it is stored: the same for a release that reads it with more fields."""
    traceparent: str = ""
    """W3C trace context of whoever submitted it, if that was traced."""

    @property
    def id(self) -> str:
        return self.job.id


class Delivery(ABC, Generic[Record, Spec]):
    """Takes jobs of one queue. Thread-safe; every method may raise Unavailable.

    Args:
        keyspace: of the queue.
        owner: name of this process in the consumer group; unique among those alive.
        reclaim_seconds: silence after which a job's owner counts as dead. Heartbeats must be several times as frequent.
        max_attempts: deliveries after which a job goes to the dead letter stream, from the last one on that brought it
            further for good; and ten times as many in all.
    """

    fields: ClassVar[Sequence[str]]
    """Fields of the hash that a record is made of."""
    spec: ClassVar[TypeAdapter[Any]]
    """Parses what was submitted."""

    def __init__(
        self, settings: CommonSettings, keyspace: Keyspace, *, owner: str, reclaim_seconds: float, max_attempts: int
    ) -> None:
        self._redis = connect(settings)
        self._keys = keyspace
        self._owner = owner
        self._reclaim_ms = max(1, int(reclaim_seconds * 1000))
        self._max_attempts = max_attempts
        self._scripts: dict[str, Script] = {}
        self._left: set[str] = set()
        self._log = structlog.get_logger("queue").bind(owner=owner)

    @abstractmethod
    def record(self, values: Any) -> Record | None:
        """A record of the values of ``fields``; None if the hash is gone."""

    def ended(self, job_id: str) -> None:
        """A job came to its end when it was delivered: it was cancelled, or its attempts are used up, and no owner is
        there to remove what others have left of it."""

    def close(self) -> None:
        """Leaves the group, unless a job is still pending here for others to reclaim."""
        try:
            self._registered(scripts.LEAVE)(keys=[self._keys.stream], args=[self._keys.group, self._owner])
        except redis.exceptions.RedisError as error:
            self._log.info("queue.leave_failed", error=str(error))
        self._redis.close()

    def ping(self) -> None:
        """Raises Unavailable if Redis does not answer."""
        call(self._redis.ping)

    def now(self) -> float:
        """Unix seconds by the clock of Redis, which times in records are of. That of this machine may be off."""
        seconds, microseconds = call(self._redis.time)
        return float(seconds) + float(microseconds) / 1e6

    def claim(self, block_seconds: float = BLOCK_SECONDS) -> Claimed[Record, Spec] | None:
        """Takes an abandoned or handed-back job, else the oldest waiting one; None if there is none for a while.

        Specs that were added straight to the stream become jobs here; invalid ones end in the dead letter stream.
        """
        entry = self._abandoned() or self._waiting(block_seconds)
        while entry is not None:
            claimed = self._begin(*entry)
            if claimed is not None:
                return claimed
            entry = self._abandoned() or self._waiting(0)
        return None

    def forget_dead_consumers(self) -> None:
        """Removes the names of processes that ended long ago from the group; never one that a job is pending for."""
        found: Any = self._grouped(lambda: self._redis.xinfo_consumers(self._keys.stream, self._keys.group))
        for consumer in found:
            if consumer["pending"] == 0 and consumer["idle"] > _DEAD_CONSUMER_MS:
                self._forget(consumer["name"])

    def heartbeat(self, claimed: Claimed[Record, Spec]) -> bool:
        """Says that the owner is alive; returns True if the job is to be cancelled. Raises JobLost."""
        return self.asked(claimed) == "CANCEL"

    def asked(self, claimed: Claimed[Record, Spec]) -> Asked:
        """The same; returns what the owner is asked to do. Raises JobLost."""
        args = [claimed.fence, self._keys.group, self._owner, claimed.entry]
        answer: Asked = self._owned(scripts.HEARTBEAT, claimed, [self._keys.stream], args)
        return answer

    def cancel_requested(self, claimed: Claimed[Record, Spec]) -> bool:
        return call(lambda: self._redis.hget(self._keys.job_key(claimed.id), "cancel")) == "1"

    def publishing(self, claimed: Claimed[Record, Spec]) -> bool:
        """Says that the result is about to be published: from then on the job cannot be cancelled, so that a job with a
        version never ends as cancelled. False: a cancellation came first. Raises JobLost."""
        answer: str = self._owned(scripts.PUBLISHING, claimed, [], [claimed.fence])
        return answer == "OK"

    def fail(self, claimed: Claimed[Record, Spec], reason: str) -> None:
        """Fails the record for good: a retry could not help. Raises JobLost."""
        self._finish(claimed, JobState.FAILED, reason)

    def cancelled(self, claimed: Claimed[Record, Spec]) -> None:
        """The owner stopped as asked. Raises JobLost."""
        self._finish(claimed, JobState.CANCELLED, "cancelled on request")

    def requeue(self, claimed: Claimed[Record, Spec], reason: str = "its engine is shutting down") -> None:
        """Hands the job back, to be claimed next; this delivery does not count as an attempt. Raises JobLost."""
        self._release(claimed, reason, counts=False)

    def retry(self, claimed: Claimed[Record, Spec], reason: str) -> bool:
        """Hands the job back after an unexpected error; False: that was its last attempt, and it is dead. Raises
        JobLost."""
        forgiven: Any = call(lambda: self._redis.hget(self._keys.job_key(claimed.id), "forgiven"))
        failures = claimed.attempt - int(forgiven or 0)
        if self._spent(claimed.attempt, failures):
            attempts = failures if failures >= self._max_attempts else claimed.attempt
            reason = f"given up after {attempts} attempts: {reason}"
            self._finish(claimed, JobState.FAILED, reason, dead=True)
            return False
        self._release(claimed, reason, counts=True)
        return True

    def is_last(self, claimed: Claimed[Record, Spec]) -> bool:
        """True if the job is given up should this attempt come to nothing."""
        return self._spent(claimed.attempt, claimed.failures + 1)

    # Parts.

    def _spent(self, attempts: int, failures: int) -> bool:
        return failures >= self._max_attempts or attempts >= _IN_ALL * self._max_attempts

    def _forget(self, name: str) -> None:
        self._run(scripts.LEAVE, [self._keys.stream], [self._keys.group, name])

    def _release(self, claimed: Claimed[Record, Spec], reason: str, *, counts: bool) -> None:
        args = [claimed.fence, self._keys.group, self._owner, claimed.entry, "1" if counts else "0"]
        keys = [self._keys.events_key(claimed.id), self._keys.stream]
        self._owned(scripts.RELEASE, claimed, keys, [*args, reason[:_REASON_LIMIT]])

    def _finish(
        self, claimed: Claimed[Record, Spec], state: str, reason: str, result: str = "", *, dead: bool = False
    ) -> None:
        args = [claimed.fence, self._keys.group, state, reason[:_REASON_LIMIT], result, "1" if dead else "0"]
        keys = [self._keys.events_key(claimed.id), self._keys.stream, self._keys.dead]
        self._owned(scripts.FINISH, claimed, keys, [*args, claimed.id])

    def _owned(self, script: str, claimed: Claimed[Record, Spec], keys: Sequence[str], args: Sequence[str]) -> Any:
        answer = self._run(script, [self._keys.job_key(claimed.id), *keys], args)
        if answer == scripts.LOST:
            raise JobLost(f"job {claimed.id} is no longer owned by {self._owner} (attempt {claimed.attempt})")
        return answer

    def _run(self, script: str, keys: Sequence[str], args: Sequence[str]) -> Any:
        registered = self._registered(script)
        return call(lambda: registered(keys=list(keys), args=list(args)))

    def _registered(self, script: str) -> Script:
        registered = self._scripts.get(script)
        if registered is None:
            registered = self._scripts.setdefault(script, self._redis.register_script(self._keys.lua(script)))
        return registered

    def _abandoned(self) -> tuple[str, dict[str, str]] | None:
        start = "0-0"
        while True:
            start, found = self._claim_idle(start)
            if found is not None or start == "0-0":
                return found

    def _claim_idle(self, start: str) -> tuple[str, tuple[str, dict[str, str]] | None]:
        """One look for an abandoned entry, which covers a few pending ones only: where to go on, and what it found."""
        reply: Any = self._grouped(
            lambda: self._redis.xautoclaim(
                self._keys.stream,
                self._keys.group,
                self._owner,
                min_idle_time=self._reclaim_ms,
                start_id=start,
                count=1,
            )
        )
        return reply[0], next(((entry, fields) for entry, fields in reply[1] if fields), None)

    def _waiting(self, block_seconds: float) -> tuple[str, dict[str, str]] | None:
        block = int(min(block_seconds, BLOCK_SECONDS) * 1000)
        reply: Any = self._grouped(
            lambda: self._redis.xreadgroup(
                self._keys.group, self._owner, {self._keys.stream: ">"}, count=1, block=block if block > 0 else None
            )
        )
        return reply[0][1][0] if reply else None

    def _grouped(self, command: Any) -> Any:
        """Runs a command of the consumer group, which is made when it is missing (a fresh or emptied Redis)."""
        try:
            return call(command)
        except redis.exceptions.ResponseError as error:
            if "NOGROUP" not in str(error) and "no such key" not in str(error):
                raise
        try:
            call(lambda: self._redis.xgroup_create(self._keys.stream, self._keys.group, id="0", mkstream=True))
        except redis.exceptions.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        return call(command)

    def _begin(self, entry: str, fields: Mapping[str, str]) -> Claimed[Record, Spec] | None:
        job_id = fields.get("job") or self._adopt(entry, fields)
        if job_id is None:
            return None
        job_key = self._keys.job_key(job_id)
        events = self._keys.events_key(job_id)
        stored: Any = call(lambda: self._redis.hmget(job_key, ["spec", "cancel"]))
        text, cancel = stored
        spec, refused = self._parsed(text)
        if refused is not None and cancel != "1" and (part := unknown_part(refused)) is not None:
            self._leave(job_id, part)
            return None
        keys = [self._keys.stream, job_key, events, self._keys.dead]
        args = [self._keys.group, entry, job_id, secrets.token_hex(8), self._owner, str(self._max_attempts)]
        args += [self._keys.settles, str(_IN_ALL * self._max_attempts)]
        outcome = self._run(scripts.BEGIN, keys, args)
        if outcome[0] == "newer":
            self._log.warning("queue.newer", job=job_id, schema=outcome[1], known=self._keys.schema.version)
            return None
        if outcome[0] != "claimed":
            self._log.info(f"queue.{outcome[0]}", job=job_id, entry=entry)
            if outcome[0] == "ended":
                self.ended(job_id)
            return None
        values: Any = call(lambda: self._redis.hmget(job_key, [*self.fields, "traceparent"]))
        *record, submitter = values
        job = self.record(record)
        if job is None or text is None:
            return None
        if refused is not None:
            reason = f"this release does not understand its spec: {first_error(refused)}"
            finish = [outcome[1], self._keys.group, str(JobState.FAILED), reason, "", "0", job_id]
            self._run(
                scripts.FINISH, [job_key, self._keys.events_key(job_id), self._keys.stream, self._keys.dead], finish
            )
            self.ended(job_id)
            return None
        return Claimed(
            job=job,
            spec=spec,
            fence=outcome[1],
            attempt=int(outcome[2]),
            failures=int(outcome[3]),
            entry=entry,
            spec_sha=text_sha(text),
            traceparent=tracing.checked(submitter or ""),
        )

    def _parsed(self, text: str | None) -> tuple[Any, ValidationError | None]:
        """A stored spec, and why it is none."""
        try:
            return None if text is None else self.spec.validate_json(text), None
        except ValidationError as error:
            return None, error

    def _leave(self, job_id: str, part: str) -> None:
        """Leaves a job of a later release to that, once this delivery has been silent for long enough; each process
        says so once in the job's events."""
        self._log.warning("queue.newer", job=job_id, unknown=part)
        if job_id not in self._left:
            self._left.add(job_id)
            message = f"left to a later release: {part!r} of its spec is not known here; upgrade engines, or cancel it"
            self._run(steering_scripts.TELL, [self._keys.events_key(job_id)], [json.dumps({"message": message})])

    def _adopt(self, entry: str, fields: Mapping[str, str]) -> str | None:
        """The id of a job made of an entry that names none; None, and a dead letter, if there can be none."""
        named = ", ".join(sorted(fields))[:200]
        self._bury(entry, f"the entry has the fields {named} and names no job", "")
        return None

    def _bury(self, entry: str, reason: str, spec: str) -> None:
        self._log.warning("queue.dead_letter", entry=entry, reason=reason)
        self._run(scripts.BURY_ENTRY, [self._keys.stream, self._keys.dead], [self._keys.group, entry, reason, spec])


def first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    what = f"{where}: {first['msg']}" if where else first["msg"]
    return what if error.error_count() == 1 else f"{what} (the first of {error.error_count()} errors)"
