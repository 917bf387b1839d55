"""The job queue on Redis Streams, as the gateway and the CLI see it: submit, look, cancel, follow.

services/common/queue/consumer.py has the trainer's face, keyspace.py the keys and scripts.py the Lua scripts. Delivery
is at least once: a job outlives its owner, Redis restarts (append-only file) and lost answers.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

from redis.commands.core import AsyncScript

from services.common.adapters.names import AdapterVersion
from services.common.errors import Conflict, InvalidRequest
from services.common.jobs import Job, JobEvent, JobState, Spec
from services.common.jobs.fine_tuning import FineTuning
from services.common.queue import scripts, steering_scripts
from services.common.queue.consumer import ClaimedJob, JobConsumer, JobLost
from services.common.queue.keyspace import TRAINING
from services.common.queue.reader import QueueReader
from services.common.queue.records import (
    FIELDS,
    event_from_entry,
    job_from_fields,
    submission,
    versions_needed,
)
from services.common.settings import CommonSettings
from services.common.storage.record_versions import PassOver
from services.common.storage.redis import BLOCK_SECONDS, call_async

__all__ = ["ClaimedJob", "JobConsumer", "JobLost", "JobQueue"]

_EVENT_ID = re.compile(r"\d{1,19}(-\d{1,19})?")
_TERMINAL = {str(state) for state in JobState if state.terminal}
_KEY_LIMIT = 256

# Spelled out, because JobQueue has a method `list`.
Jobs: TypeAlias = list[Job]
Versions: TypeAlias = set[AdapterVersion]
Events: TypeAlias = list[JobEvent]
Entries: TypeAlias = list[tuple[str, dict[str, str]]]


class JobQueue(QueueReader[Job]):
    """Submits and observes jobs. For one asyncio loop; every method may raise Unavailable."""

    fields = FIELDS
    called = "job"

    def __init__(self, settings: CommonSettings) -> None:
        super().__init__(settings, replace(TRAINING, ttl=settings.jobs_ttl_seconds))
        self._submit = self._script(scripts.SUBMIT)
        self._cancel = self._script(steering_scripts.CANCEL)
        self._pause = self._script(steering_scripts.PAUSE)
        self._resume = self._script(steering_scripts.RESUME)
        self._unfinished = self._script(steering_scripts.UNFINISHED)

    def record(self, values: Any) -> Job | None:
        return job_from_fields(values)

    async def submitted(self, idempotency_key: str, request_sha: str, *, key_id: str = "") -> Job | None:
        """The job that this request made when it came before under the same key.

        Args:
            key_id: of the API key that sends it; idempotency keys of others are others'.

        Raises:
            Conflict: the key came with another request.
            InvalidRequest: the key is empty or longer than 256 characters.
        """
        key = TRAINING.idempotency_key(_checked(idempotency_key), key_id)
        known = await call_async(lambda: cast(Awaitable[str | None], self._redis.get(key)))
        if known is None:
            return None
        job_id, sha = known.split(" ")
        if sha != request_sha:
            raise _key_used(idempotency_key, job_id)
        return await self._find(job_id)

    async def submit(
        self,
        spec: Spec,
        *,
        idempotency_key: str | None = None,
        request_sha: str | None = None,
        traceparent: str = "",
        key_id: str = "",
        fine_tuning: FineTuning | None = None,
    ) -> Job:
        """Queues a job. The same key with the same request returns the same job, for a week.

        Args:
            key_id: of the API key whose job it is; empty: there are no keys.
            traceparent: of the request that submits it.
            request_sha: digest of what the client sent, when the spec was made from it; default: the spec's own.
            fine_tuning: what it was asked for as, over OpenAI's API of fine-tuning jobs.

        Raises:
            Conflict: the key was used with another request.
            InvalidRequest: the key is empty or longer than 256 characters.
        """
        if idempotency_key is not None:
            _checked(idempotency_key)
        # A large spec takes a second to write out: not on the event loop.
        keys, args = await asyncio.to_thread(
            submission,
            spec,
            idempotency_key=idempotency_key,
            request_sha=request_sha,
            traceparent=traceparent,
            key_id=key_id,
            fine_tuning=fine_tuning,
        )
        outcome, existing = await call_async(lambda: self._submit(keys=keys, args=args))
        if outcome == "conflict":
            raise _key_used(idempotency_key or "", existing)
        await self._forget_expired(TRAINING.index)
        return await self.get(existing)

    async def list(
        self,
        *,
        limit: int = 50,
        after: str | None = None,
        state: JobState | None = None,
        adapter: str | None = None,
        kind: str | None = None,
        key_id: str | None = None,
        where: Callable[[Job], bool] | None = None,
        pass_over: PassOver | None = None,
    ) -> Jobs:
        """Jobs, newest first.

        Args:
            key_id: of one API key only; None: everybody's.
            after: continue behind this job id (the last one of the page before).
            where: of those only for which this holds.
            pass_over: told of jobs of a later release, whatever else is asked for. None: they are an error.

        Raises:
            NotFound: there is no job ``after``.
            NewerSchema: there is a job of a later release.
        """

        def wanted(job: Job) -> bool:
            return (
                (state is None or job.state == state)
                and (adapter is None or job.adapter == adapter)
                and (kind is None or job.kind == kind)
                and (key_id is None or job.key_id == key_id)
                and (where is None or where(job))
            )

        return await self._page(TRAINING.index, limit, after, wanted, pass_over=pass_over)

    async def unfinished(self) -> Jobs:
        """All queued and running jobs."""
        return await self._page(TRAINING.index, sys.maxsize, None, lambda job: not job.state.terminal)

    async def versions_needed(self) -> Versions:
        """The adapter versions that unfinished jobs name. Raises NewerSchema: there is a job that a later release
        wrote."""
        flat: Any = await call_async(lambda: self._unfinished(keys=[TRAINING.index]))
        return await asyncio.to_thread(versions_needed, flat)  # specs may be megabytes

    async def cancel(self, job_id: str, reason: str = "") -> Job:
        """Cancels a queued job at once and asks the owner of a running one to stop. Terminal jobs stay as they are.

        Args:
            reason: that it ends with. Then the data of the job leave Redis at once; empty: with its end.

        Raises:
            NotFound: there is no such job.
            Conflict: its result is being published.
        """
        answer = await self._steer(self._cancel, job_id, [TRAINING.group, TRAINING.settles, reason])
        if answer == "LATE":
            raise Conflict(
                f"job {job_id} has trained and is publishing its adapter: too late to cancel; when it has ended, "
                "attach the version from before to undo it",
                param="id",
            )
        return await self.get(job_id)

    async def pause(self, job_id: str) -> Job:
        """Takes a queued job out of the queue until it is resumed, and asks the owner of a running one to hand it back,
        with a checkpoint. One that is paused stays so.

        Raises:
            NotFound: there is no such job.
            Conflict: it has ended, is being cancelled, or its result is being published.
        """
        answer = await self._steer(self._pause, job_id, [TRAINING.group])
        if answer != "OK":
            why = {"ENDED": "has ended", "LATE": "has trained and is publishing its adapter"}
            raise Conflict(f"job {job_id} {why.get(answer, 'is being cancelled')}: nothing to pause", param="id")
        return await self.get(job_id)

    async def resume(self, job_id: str) -> Job:
        """Puts a paused job back into the queue, to go on from its checkpoint. One that is not paused stays as it is.

        Raises:
            NotFound: there is no such job.
            Conflict: it has ended.
        """
        if await self._steer(self._resume, job_id, []) != "OK":
            raise Conflict(f"job {job_id} has ended: nothing to resume", param="id")
        return await self.get(job_id)

    async def _steer(self, script: AsyncScript, job_id: str, args: Sequence[str]) -> str:
        keys = [TRAINING.job_key(job_id), TRAINING.events_key(job_id), TRAINING.stream]
        answer = await call_async(lambda: script(keys=keys, args=[*args]))
        if answer in ("MISSING", "NEWER"):
            await self.get(job_id)  # raises
            raise self.missing(job_id)
        return str(answer)

    async def newest_events(self, job_id: str, limit: int, before: str | None = None) -> Events:
        """A page of the job's events, newest first: those before an event's id, without it the newest."""
        latest = "+" if before is None else f"({before}"
        key = TRAINING.events_key(job_id)
        reply: Any = await call_async(lambda: self._redis.xrevrange(key, latest, "-", count=limit))
        return [event_from_entry(entry_id, fields) for entry_id, fields in reply]

    async def events(self, job_id: str, last_event_id: str | None = None) -> AsyncIterator[JobEvent]:
        """Replays the job's events behind ``last_event_id`` (None: all), then follows until it is terminal.

        Raises:
            NotFound: there is no such job.
            InvalidRequest: last_event_id is not one of ours.
        """
        if last_event_id and not _EVENT_ID.fullmatch(last_event_id):
            raise InvalidRequest(f"Last-Event-ID {last_event_id[:40]!r} is not an event id", param="Last-Event-ID")
        await self.get(job_id)
        position = last_event_id or "0"
        block: int | None = None
        while True:
            entries = await self._read(job_id, position, block)
            for entry_id, fields in entries:
                position = entry_id
                event = event_from_entry(entry_id, fields)
                yield event
                if event.kind == "state" and event.data.get("state") in _TERMINAL:
                    return
            if not entries:
                job = await self._find(job_id)
                # A terminal job with nothing left to read: its last event was seen before, or has expired.
                if job is None or (job.state.terminal and not await self._read(job_id, position, None)):
                    return
                block = int(BLOCK_SECONDS * 1000)

    async def _read(self, job_id: str, position: str, block: int | None) -> Entries:
        key = TRAINING.events_key(job_id)
        reply: Any = await call_async(lambda: self._redis.xread({key: position}, count=500, block=block))
        return reply[0][1] if reply else []


def _checked(key: str) -> str:
    if not 0 < len(key) <= _KEY_LIMIT:
        raise InvalidRequest(f"idempotency key must have 1 to {_KEY_LIMIT} characters", param="idempotency_key")
    return key


def _key_used(key: str, job_id: str) -> Conflict:
    return Conflict(
        f"idempotency key {key!r} was used for job {job_id} with another request; use a new key",
        param="idempotency_key",
    )
