"""The job queue as the trainer sees it: claim, heartbeat, report, finish. Blocking.

Every write of an owner carries its fencing token; once another owner has claimed the job, or it was cancelled while
it waited, the write changes nothing and raises JobLost.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import redis
import structlog
from pydantic import ValidationError
from redis.commands.core import Script

from services.common import scripts
from services.common.errors import TemperError
from services.common.job_records import (
    FIELDS,
    SPEC,
    finite,
    job_from_fields,
    job_id_of_entry,
    spec_json,
    text_sha,
    versions_needed,
)
from services.common.jobs import Job, JobProgress, JobState, Spec
from services.common.names import AdapterVersion
from services.common.redis_client import BLOCK_SECONDS, call, connect
from services.common.settings import CommonSettings

EventKind = Literal["checkpoint", "eval", "published", "log"]
_REASON_LIMIT = 2000
_SCAN = 100
"""Stream entries that one adopt_waiting looks at."""
_DEAD_CONSUMER_MS = 24 * 3600 * 1000


class JobLost(TemperError):
    """Somebody else owns the job by now, or nobody: what this owner still does with it is void."""

    code = "job_lost"


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job that this process may run until it finishes, hands it back or goes silent for too long."""

    job: Job
    spec: Spec
    fence: str
    attempt: int
    """From 1."""
    entry: str

    @property
    def id(self) -> str:
        return self.job.id


class JobConsumer:
    """Takes jobs and writes their progress. Thread-safe; every method may raise Unavailable.

    Args:
        owner: name of this process in the consumer group; unique among those alive.
        reclaim_seconds: silence after which a job's owner counts as dead. Heartbeats must be several times as frequent.
        max_attempts: deliveries after which a job goes to the dead letter stream.
    """

    def __init__(
        self, settings: CommonSettings, *, owner: str, reclaim_seconds: float = 30.0, max_attempts: int = 3
    ) -> None:
        self._redis = connect(settings)
        self._owner = owner
        self._reclaim_ms = max(1, int(reclaim_seconds * 1000))
        self._max_attempts = max_attempts
        self._scripts: dict[str, Script] = {}
        self._scanned = "0-0"
        self._log = structlog.get_logger("queue").bind(owner=owner)

    def close(self) -> None:
        """Leaves the group, unless a job is still pending here for others to reclaim."""
        try:
            pending = self._redis.xpending_range(scripts.STREAM, scripts.GROUP, "-", "+", 1, self._owner)
            if not pending:
                self._redis.xgroup_delconsumer(scripts.STREAM, scripts.GROUP, self._owner)
        except redis.exceptions.RedisError as error:
            self._log.info("queue.leave_failed", error=str(error))
        self._redis.close()

    def ping(self) -> None:
        """Raises Unavailable if Redis does not answer."""
        call(self._redis.ping)

    def claim(self, block_seconds: float = BLOCK_SECONDS) -> ClaimedJob | None:
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

    def adopt_waiting(self) -> None:
        """Makes jobs of new valid specs in the stream without claiming them, so that they are seen while they wait."""
        entries: Any = call(lambda: self._redis.xrange(scripts.STREAM, min=f"({self._scanned}", count=_SCAN))
        for entry, fields in entries:
            self._scanned = entry
            if "job" not in fields:
                self._adopt(entry, fields, waiting=True)

    def forget_dead_consumers(self) -> None:
        """Removes the names of processes that ended long ago from the group; never one that a job is pending for."""
        found: Any = self._grouped(lambda: self._redis.xinfo_consumers(scripts.STREAM, scripts.GROUP))
        for consumer in found:
            if consumer["pending"] == 0 and consumer["idle"] > _DEAD_CONSUMER_MS:
                self._forget(consumer["name"])

    def heartbeat(self, claimed: ClaimedJob) -> bool:
        """Says that the owner is alive; returns True if the job is to be cancelled. Raises JobLost."""
        args = [claimed.fence, scripts.GROUP, self._owner, claimed.entry]
        answer: str = self._owned(scripts.HEARTBEAT, claimed, [scripts.STREAM], args)
        return answer == "CANCEL"

    def cancel_requested(self, claimed: ClaimedJob) -> bool:
        return call(lambda: self._redis.hget(scripts.job_key(claimed.id), "cancel")) == "1"

    def resolve_parent(self, claimed: ClaimedJob, parent: str | None) -> str | None:
        """Records what training starts from ("name@n", several with commas between them), at the first attempt, and
        returns what was recorded. Raises JobLost."""
        return self._owned(scripts.PARENT, claimed, [], [claimed.fence, parent or ""]) or None

    def recorded_parent(self, claimed: ClaimedJob) -> tuple[bool, str | None]:
        """Whether an earlier attempt resolved the parent, and to what (None: a new adapter)."""
        parent: Any = call(lambda: self._redis.hget(scripts.job_key(claimed.id), "parent"))
        return parent is not None, parent or None

    def versions_needed(self) -> set[AdapterVersion]:
        """The adapter versions that unfinished jobs name."""
        return versions_needed(self._run(scripts.UNFINISHED, [scripts.INDEX], []))

    def publishing(self, claimed: ClaimedJob) -> bool:
        """Says that the result is about to be published: from then on the job cannot be cancelled, so that a job with a
        version never ends as cancelled. False: a cancellation came first. Raises JobLost."""
        answer: str = self._owned(scripts.PUBLISHING, claimed, [], [claimed.fence])
        return answer == "OK"

    def report(self, claimed: ClaimedJob, progress: JobProgress, metrics: Mapping[str, float]) -> None:
        """Stores progress and the newest metrics, and adds a progress event. Raises JobLost."""
        numbers = finite(metrics)
        data = {**numbers, **progress.model_dump(exclude_none=True)}
        args = [claimed.fence, progress.model_dump_json(), json.dumps(numbers), json.dumps(data)]
        self._owned(scripts.REPORT, claimed, [scripts.events_key(claimed.id)], args)

    def event(self, claimed: ClaimedJob, kind: EventKind, data: Mapping[str, Any]) -> None:
        """Adds an event. Raises JobLost."""
        args = [claimed.fence, kind, json.dumps(dict(data))]
        self._owned(scripts.EVENT, claimed, [scripts.events_key(claimed.id)], args)

    def succeed(self, claimed: ClaimedJob, result_adapter: str) -> None:
        """Raises JobLost."""
        self._finish(claimed, JobState.SUCCEEDED, "", result_adapter)

    def fail(self, claimed: ClaimedJob, reason: str) -> None:
        """For good: a retry could not help. Raises JobLost."""
        self._finish(claimed, JobState.FAILED, reason)

    def cancelled(self, claimed: ClaimedJob) -> None:
        """The owner stopped as asked. Raises JobLost."""
        self._finish(claimed, JobState.CANCELLED, "cancelled on request")

    def requeue(self, claimed: ClaimedJob, reason: str = "its engine is shutting down") -> None:
        """Hands the job back, to be claimed next; this delivery does not count as an attempt. Raises JobLost."""
        self._release(claimed, reason, counts=False)

    def retry(self, claimed: ClaimedJob, reason: str) -> None:
        """Hands the job back after an unexpected error; after the last attempt it is dead. Raises JobLost."""
        if claimed.attempt >= self._max_attempts:
            reason = f"given up after {claimed.attempt} attempts: {reason}"
            self._finish(claimed, JobState.FAILED, reason, dead=True)
        else:
            self._release(claimed, reason, counts=True)

    # Parts.

    def _forget(self, name: str) -> None:
        call(lambda: self._redis.xgroup_delconsumer(scripts.STREAM, scripts.GROUP, name))

    def _release(self, claimed: ClaimedJob, reason: str, *, counts: bool) -> None:
        args = [claimed.fence, scripts.GROUP, self._owner, claimed.entry, "1" if counts else "0"]
        keys = [scripts.events_key(claimed.id), scripts.STREAM]
        self._owned(scripts.RELEASE, claimed, keys, [*args, reason[:_REASON_LIMIT]])

    def _finish(
        self, claimed: ClaimedJob, state: JobState, reason: str, result: str = "", *, dead: bool = False
    ) -> None:
        args = [claimed.fence, scripts.GROUP, str(state), reason[:_REASON_LIMIT], result, "1" if dead else "0"]
        keys = [scripts.events_key(claimed.id), scripts.STREAM, scripts.DEAD]
        self._owned(scripts.FINISH, claimed, keys, [*args, claimed.id])

    def _owned(self, script: str, claimed: ClaimedJob, keys: Sequence[str], args: Sequence[str]) -> Any:
        answer = self._run(script, [scripts.job_key(claimed.id), *keys], args)
        if answer == scripts.LOST:
            raise JobLost(f"job {claimed.id} is no longer owned by {self._owner} (attempt {claimed.attempt})")
        return answer

    def _run(self, script: str, keys: Sequence[str], args: Sequence[str]) -> Any:
        registered = self._scripts.get(script)
        if registered is None:
            registered = self._scripts.setdefault(script, self._redis.register_script(script))
        return call(lambda: registered(keys=list(keys), args=list(args)))

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
                scripts.STREAM, scripts.GROUP, self._owner, min_idle_time=self._reclaim_ms, start_id=start, count=1
            )
        )
        return reply[0], next(((entry, fields) for entry, fields in reply[1] if fields), None)

    def _waiting(self, block_seconds: float) -> tuple[str, dict[str, str]] | None:
        block = int(min(block_seconds, BLOCK_SECONDS) * 1000)
        reply: Any = self._grouped(
            lambda: self._redis.xreadgroup(
                scripts.GROUP, self._owner, {scripts.STREAM: ">"}, count=1, block=block if block > 0 else None
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
            call(lambda: self._redis.xgroup_create(scripts.STREAM, scripts.GROUP, id="0", mkstream=True))
        except redis.exceptions.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        return call(command)

    def _begin(self, entry: str, fields: Mapping[str, str]) -> ClaimedJob | None:
        job_id = fields.get("job") or self._adopt(entry, fields)
        if job_id is None:
            return None
        job_key = scripts.job_key(job_id)
        keys = [scripts.STREAM, job_key, scripts.events_key(job_id), scripts.DEAD]
        args = [scripts.GROUP, entry, job_id, secrets.token_hex(8), self._owner, str(self._max_attempts)]
        outcome = self._run(scripts.BEGIN, keys, args)
        if outcome[0] != "claimed":
            self._log.info(f"queue.{outcome[0]}", job=job_id, entry=entry)
            return None
        values: Any = call(lambda: self._redis.hmget(job_key, [*FIELDS, "spec"]))
        job, text = job_from_fields(values[:-1]), values[-1]
        if job is None or text is None:
            return None
        try:
            spec = SPEC.validate_json(text)
        except ValidationError as error:  # stored by a release with another schema
            reason = f"this release does not understand its spec: {_first_error(error)}"
            finish = [outcome[1], scripts.GROUP, str(JobState.FAILED), reason, "", "0", job_id]
            self._run(scripts.FINISH, [job_key, scripts.events_key(job_id), scripts.STREAM, scripts.DEAD], finish)
            return None
        return ClaimedJob(job=job, spec=spec, fence=outcome[1], attempt=int(outcome[2]), entry=entry)

    def _adopt(self, entry: str, fields: Mapping[str, str], *, waiting: bool = False) -> str | None:
        """Makes a job of a spec that somebody XADDed; None if it is not a valid one, then a dead letter at delivery."""
        text = fields.get("spec")
        if text is None:
            if not waiting:
                named = ", ".join(sorted(fields))[:200]
                self._bury(entry, f"the entry has the fields {named} and needs spec: the job as JSON", "")
            return None
        try:
            spec = SPEC.validate_json(text)
        except ValidationError as error:
            if not waiting:
                self._bury(entry, f"invalid spec: {_first_error(error)}", text)
            return None
        key = fields.get("idempotency_key")
        job_id = job_id_of_entry(entry)
        keys = [scripts.STREAM, scripts.INDEX, scripts.job_key(job_id), scripts.events_key(job_id)]
        canonical = spec_json(spec)
        args = [job_id, canonical, text_sha(canonical), spec.kind, spec.adapter, json.dumps(spec.metadata)]
        keys += [scripts.idempotency_key(key or ""), scripts.line_key(spec.adapter)]
        outcome, existing = self._run(scripts.SUBMIT, keys, [*args, "1" if key else "0", entry])
        if outcome == "conflict":
            if not waiting:
                self._bury(entry, f"idempotency key {key!r} was used for job {existing} with another spec", text)
            return None
        return str(existing)

    def _bury(self, entry: str, reason: str, spec: str) -> None:
        self._log.warning("queue.dead_letter", entry=entry, reason=reason)
        self._run(scripts.BURY_ENTRY, [scripts.STREAM, scripts.DEAD], [scripts.GROUP, entry, reason, spec])


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    what = f"{where}: {first['msg']}" if where else first["msg"]
    return what if error.error_count() == 1 else f"{what} (the first of {error.error_count()} errors)"
