"""The job queue as the trainer sees it: claim, heartbeat, report, finish. Blocking.

services/common/queue/delivery.py has what every queue's consumer does; here is what only training jobs have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from services.common.adapters.names import AdapterVersion
from services.common.errors import Conflict, NewerSchema
from services.common.jobs import Job, JobProgress, JobState, Spec
from services.common.queue import scripts, steering_scripts
from services.common.queue.delivery import Claimed, Delivery, JobLost, first_error
from services.common.queue.keyspace import TRAINING
from services.common.queue.records import (
    FIELDS,
    SPEC,
    finite,
    job_from_fields,
    submission,
    versions_needed,
)
from services.common.settings import CommonSettings
from services.common.storage.record_versions import JOB
from services.common.storage.redis import call

__all__ = ["ClaimedJob", "EventKind", "JobConsumer", "JobLost"]

EventKind = Literal["checkpoint", "eval", "published", "log"]
ClaimedJob: TypeAlias = Claimed[Job, Spec]
_SCAN = 100
"""Stream entries that one adopt_waiting looks at."""


class JobConsumer(Delivery[Job, Spec]):
    """Takes jobs and writes their progress. Thread-safe; every method may raise Unavailable.

    Args:
        owner: name of this process in the consumer group; unique among those alive.
        reclaim_seconds: silence after which a job's owner counts as dead. Heartbeats must be several times as frequent.
        max_attempts: see Delivery.
        left_over: told a job's id and its adapter when it ended without an owner; may raise Unavailable.
    """

    fields = FIELDS
    spec = SPEC

    def __init__(
        self,
        settings: CommonSettings,
        *,
        owner: str,
        reclaim_seconds: float = 30.0,
        max_attempts: int = 3,
        left_over: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        keyspace = replace(TRAINING, ttl=settings.jobs_ttl_seconds)
        super().__init__(settings, keyspace, owner=owner, reclaim_seconds=reclaim_seconds, max_attempts=max_attempts)
        self._scanned = "0-0"
        self._left_over = left_over

    def ended(self, job_id: str) -> None:
        """See Delivery."""
        adapter: Any = call(lambda: self._redis.hget(TRAINING.job_key(job_id), "adapter"))
        self._left_over(job_id, adapter or "")

    def record(self, values: Any) -> Job | None:
        return job_from_fields(values)

    def claim_beside(self, kinds: Collection[str]) -> ClaimedJob | None:
        """Takes an abandoned or handed-back job, else the oldest waiting one if it is of one of these kinds, for an
        owner that has others. Does not wait, so a job that is submitted goes to an owner that waits for one in `claim`.
        """
        while True:
            entry = self._abandoned()
            if entry is None and self._next_kind() in kinds:
                entry = self._waiting(0)
            if entry is None:
                return None
            if (claimed := self._begin(*entry)) is not None:
                return claimed

    def adopt_waiting(self) -> None:
        """Makes jobs of new valid specs in the stream without claiming them, so that they are seen while they wait."""
        entries: Any = call(lambda: self._redis.xrange(TRAINING.stream, min=f"({self._scanned}", count=_SCAN))
        for entry, fields in entries:
            self._scanned = entry
            if "job" not in fields:
                self._adopt(entry, fields, waiting=True)

    def resolve_parent(self, claimed: ClaimedJob, parent: str | None) -> str | None:
        """Records what training starts from ("name@n", several with commas between them), at the first attempt, and
        returns what was recorded. Raises JobLost."""
        return self._owned(scripts.PARENT, claimed, [], [claimed.fence, parent or ""]) or None

    def recorded_parent(self, claimed: ClaimedJob) -> tuple[bool, str | None]:
        """True if an earlier attempt resolved the parent, and the result (None: a new adapter)."""
        parent: Any = call(lambda: self._redis.hget(TRAINING.job_key(claimed.id), "parent"))
        return parent is not None, parent or None

    def versions_needed(self) -> set[AdapterVersion]:
        """The adapter versions that unfinished jobs name. Raises NewerSchema: see JobQueue.versions_needed."""
        return versions_needed(self._run(steering_scripts.UNFINISHED, [TRAINING.index], []))

    def report(
        self, claimed: ClaimedJob, progress: JobProgress, metrics: Mapping[str, float], number: int | None = None
    ) -> None:
        """Stores progress and the newest metrics, and adds a progress event. Raises JobLost.

        Args:
            number: above those of everything that this owner has reported of the job: when it comes again, because its
                answer got lost, it changes nothing. None: it may count twice.
        """
        numbers = finite(metrics)
        data = {**numbers, **progress.model_dump(exclude_none=True)}
        args = [claimed.fence, _once(number), progress.model_dump_json(), json.dumps(numbers), json.dumps(data)]
        self._owned(scripts.REPORT, claimed, [TRAINING.events_key(claimed.id)], args)

    def describe(
        self,
        claimed: ClaimedJob,
        settings: Mapping[str, float],
        notes: Sequence[str],
        metrics: Mapping[str, float],
        number: int | None = None,
        evaluation: str = "",
        report: str = "",
    ) -> None:
        """Stores what the job trains with, all that its user should know, and more metrics. Raises JobLost.

        Args:
            number: see report.
            evaluation: id of the evaluation by which its gates decide; empty: there is none yet.
            report: JSON of what a dry run found out; empty: it has not yet.
        """
        numbered = {str(number): note for number, note in enumerate(notes)}
        args = [json.dumps(dict(settings)), json.dumps(numbered), json.dumps(finite(metrics)), evaluation, report]
        self._owned(scripts.DESCRIBE, claimed, [], [claimed.fence, _once(number), *args])

    def event(self, claimed: ClaimedJob, kind: EventKind, data: Mapping[str, Any], number: int | None = None) -> None:
        """Adds an event. ``number``: see report. Raises JobLost."""
        args = [claimed.fence, _once(number), kind, json.dumps(dict(data))]
        self._owned(scripts.EVENT, claimed, [TRAINING.events_key(claimed.id)], args)

    def kept(self, claimed: ClaimedJob) -> None:
        """Says that a part of the work is safe for whoever goes on with it: the attempts before this one do not count
        as failures. Raises JobLost."""
        self._owned(scripts.KEPT, claimed, [], [claimed.fence])

    def succeed(self, claimed: ClaimedJob, result_adapter: str) -> None:
        """Raises JobLost."""
        self._finish(claimed, JobState.SUCCEEDED, "", result_adapter)

    def submit(self, spec: Spec, *, idempotency_key: str, traceparent: str = "", key_id: str = "") -> str:
        """Queues a job that follows on another one; the same key with the same spec is the same job. Arguments as of
        JobQueue.submit.

        Returns:
            Its id.

        Raises:
            Conflict: the key was used with another spec.
        """
        keys, args = submission(spec, idempotency_key=idempotency_key, traceparent=traceparent, key_id=key_id)
        outcome, existing = self._run(scripts.SUBMIT, keys, args)
        if outcome == "conflict":
            raise Conflict(f"idempotency key {idempotency_key!r} was used for job {existing} with another spec")
        return str(existing)

    # Parts.

    def _next_kind(self) -> str:
        return str(self._run(scripts.NEXT_KIND, [TRAINING.stream], [TRAINING.group]))

    def _adopt(self, entry: str, fields: Mapping[str, str], *, waiting: bool = False) -> str | None:
        """Makes a job of a spec that somebody XADDed; None if it is not a valid one, then a dead letter at delivery."""
        text = fields.get("spec")
        if text is None:
            if not waiting:
                named = ", ".join(sorted(fields))[:200]
                self._bury(entry, f"the entry has the fields {named} and needs spec: the job as JSON", "")
            return None
        try:
            JOB.check(fields.get("schema"), "the entry")
            spec = SPEC.validate_json(text)
        except NewerSchema as error:  # stays, for a later release
            self._log.warning("queue.newer", entry=entry, error=error.message)
            return None
        except ValidationError as error:
            if not waiting:
                self._bury(entry, f"invalid spec: {first_error(error)}", text)
            return None
        key = fields.get("idempotency_key")
        keys, args = submission(
            spec, idempotency_key=key or None, traceparent=fields.get("traceparent", ""), entry=entry
        )
        outcome, existing = self._run(scripts.SUBMIT, keys, args)
        if outcome == "conflict":
            if not waiting:
                self._bury(entry, f"idempotency key {key!r} was used for job {existing} with another spec", text)
            return None
        return str(existing)


def _once(number: int | None) -> str:
    return "" if number is None else str(number)
