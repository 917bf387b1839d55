"""Keyspace of a queue: what its keys in Redis are called.

Those of training jobs (TRAINING) are:
    temper:jobs                 stream of work: entries {job: id}, or {spec: JSON, idempotency_key?} straight from CI
    temper:jobs:index           sorted set of job ids by creation time, for listing
    temper:jobs:dead            stream of what was given up: {job?, entry, reason, spec?}
    temper:job:{id}             hash: the job, its spec and who owns it now
    temper:job:{id}:events      stream of JobEvents
    temper:line:{adapter}       list of the adapter's unfinished job ids in the order of submission
    temper:idempotency:{key}    "job-id request-sha", expires

services/common/queue/scripts.py says in which of them a job can be, and moves it.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.common.storage.record_versions import JOB, Schema

JOB_TTL = 30 * 86400
"""Seconds that a terminal job stays visible."""


@dataclass(frozen=True, slots=True)
class Keyspace:
    """Keys and consumer group of one queue, and what the scripts do otherwise for it than for another.

    Args:
        stream: of work; index and dead letters are beside it.
        group: the consumers'.
        jobs, lines, keys: what the names of jobs, lines and idempotency keys begin with.
        schema: of the jobs' hashes.
        settled_by_owner: what an attempt has made is kept when its job is cancelled. So a job that has once begun is
            delivered even then, for its owner to end it.
        tells: whether the end of a job is an event for webhooks.
        ttl: seconds that a terminal job stays visible.
    """

    stream: str
    group: str
    jobs: str
    lines: str
    keys: str
    schema: Schema
    settled_by_owner: bool = False
    tells: bool = False
    ttl: int = JOB_TTL

    @property
    def index(self) -> str:
        return f"{self.stream}:index"

    @property
    def dead(self) -> str:
        return f"{self.stream}:dead"

    @property
    def settles(self) -> str:
        """``settled_by_owner`` as the scripts take it."""
        return "1" if self.settled_by_owner else "0"

    def job_key(self, job_id: str) -> str:
        return f"{self.jobs}{job_id}"

    def events_key(self, job_id: str) -> str:
        return f"{self.jobs}{job_id}:events"

    def line_key(self, line: str) -> str:
        return f"{self.lines}{line}"

    def idempotency_key(self, key: str, key_id: str = "") -> str:
        """Key of a submission.

        Args:
            key: what its client sent.
            key_id: of the client's API key; it stands before a space, which no client can send.
        """
        return f"{self.keys}{key_id} {key}" if key_id else f"{self.keys}{key}"

    def lua(self, script: str) -> str:
        """A script for this queue: all queues share them."""
        names = f"'{self.jobs}', '{self.lines}', {self.schema.version}, {int(self.tells)}, {self.ttl}"
        return f"local JOBS, LINES, SCHEMA, TELLS, TTL = {names}\n{script}"


TRAINING = Keyspace("temper:jobs", "trainers", "temper:job:", "temper:line:", "temper:idempotency:", JOB, tells=True)
