"""In-memory stand-ins for the object store and the job queue."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Sequence

from services.common.adapters.names import AdapterVersion
from services.common.adapters.pointer_document import Change
from services.common.errors import Conflict, NotFound, Unavailable
from services.common.jobs import Job, JobEvent, JobState, Spec
from services.common.jobs.fields.dataset import OfDataset
from services.common.jobs.fine_tuning import FineTuning
from services.common.queue.depth import QueueDepth
from services.common.queue.job_queue import Events
from services.common.queue.records import spec_json, spec_sha, versions_needed
from services.common.storage.object_store import ObjectNotFound, PreconditionFailed, StoredObject
from services.common.storage.record_versions import PassOver
from services.gateway.core.webhook_store import Delivery


class MemoryStore:
    """ObjectStore's methods over a dictionary."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.down = False

    def _check(self) -> None:
        if self.down:
            raise Unavailable("the object store is away")

    def _etag(self, key: str) -> str:
        return hashlib.md5(self.objects[key]).hexdigest()

    def get(self, key: str) -> StoredObject:
        self._check()
        if key not in self.objects:
            raise ObjectNotFound(f"no object {key}")
        return StoredObject(self.objects[key], self._etag(key))

    def put(self, key: str, data: bytes, *, if_match: str | None = None, if_absent: bool = False) -> str:
        self._check()
        if (if_absent and key in self.objects) or (if_match is not None and self._etag(key) != if_match):
            raise PreconditionFailed(key)
        self.objects[key] = data
        return self._etag(key)

    def head(self, key: str) -> str | None:
        self._check()
        return self._etag(key) if key in self.objects else None

    def list(self, prefix: str, recursive: bool = True) -> list[str]:
        self._check()
        return sorted(key for key in self.objects if key.startswith(prefix))

    def list_page(self, prefix: str, after: str, limit: int) -> list[str]:
        return [key for key in self.list(prefix) if key > f"{prefix}{after}"][:limit]

    def list_dirs(self, prefix: str) -> list[str]:
        self._check()
        return sorted({key[len(prefix) :].split("/")[0] for key in self.objects if key.startswith(prefix)})

    def delete(self, key: str) -> None:
        self._check()
        self.objects.pop(key, None)

    def delete_prefix(self, prefix: str) -> None:
        for key in self.list(prefix):
            self.delete(key)


class MemoryQueue:
    """JobQueue's methods over a dictionary."""

    def __init__(self) -> None:
        self.specs: dict[str, Spec] = {}
        self.jobs: dict[str, Job] = {}
        self.keys: dict[tuple[str, str], tuple[str, str]] = {}
        self.entries: dict[str, list[JobEvent]] = {}
        self.down = False

    def _check(self) -> None:
        if self.down:
            raise Unavailable("Redis is away")

    async def aclose(self) -> None:
        return None

    async def ping(self) -> None:
        self._check()

    async def depth(self) -> QueueDepth:
        self._check()
        states = [job.state for job in self.jobs.values()]
        return QueueDepth(states.count(JobState.QUEUED), states.count(JobState.RUNNING), 0, 0.0)

    async def submitted(self, idempotency_key: str, request_sha: str, *, key_id: str = "") -> Job | None:
        self._check()
        if (key_id, idempotency_key) not in self.keys:
            return None
        known, sha = self.keys[key_id, idempotency_key]
        if sha != request_sha:
            raise Conflict("the idempotency key was used with another request", param="idempotency_key")
        return self.jobs[known]

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
        sha = request_sha or spec_sha(spec)
        if idempotency_key is not None and (known := await self.submitted(idempotency_key, sha, key_id=key_id)):
            return known
        self._check()
        learnt = spec.learnt if isinstance(spec, OfDataset) else None
        job = Job(
            id=f"job-{len(self.jobs)}",
            kind=spec.kind,
            adapter=spec.adapter,
            state=JobState.QUEUED,
            created_at=time.time(),
            key_id=key_id or None,
            dataset=None if learnt is None else learnt.version,
            dataset_digest=None if learnt is None else learnt.digest,
            metadata=spec.metadata,
            fine_tuning=fine_tuning,
        )
        self.jobs[job.id], self.specs[job.id] = job, spec
        self.entries[job.id] = [self._event(job.id, 1, "state", {"state": "queued"})]
        if idempotency_key is not None:
            self.keys[key_id, idempotency_key] = (job.id, sha)
        return job

    def _event(self, job_id: str, number: int, kind: str, data: dict[str, object]) -> JobEvent:
        return JobEvent(id=f"{number}-0", kind=kind, time=time.time(), data=data)

    def finish(self, job_id: str) -> None:
        self.entries[job_id] += [
            self._event(job_id, 2, "progress", {"step": 1, "loss": 0.5}),
            self._event(job_id, 3, "state", {"state": "succeeded"}),
        ]

    async def versions_needed(self) -> set[AdapterVersion]:
        self._check()
        unfinished = [self.specs[job.id] for job in self.jobs.values() if not job.state.terminal]
        return versions_needed([part for spec in unfinished for part in (spec_json(spec), "")])

    async def get(self, job_id: str) -> Job:
        self._check()
        if job_id not in self.jobs:
            raise self.missing(job_id)
        return self.jobs[job_id]

    def missing(self, job_id: str) -> NotFound:
        return NotFound(f"no such job: {job_id[:80]!r}", param="id")  # as QueueReader.missing says

    async def list(
        self, *, limit=50, after=None, state=None, adapter=None, kind=None, key_id=None, where=None, pass_over=None
    ) -> list[Job]:
        self._check()
        found = [
            job
            for job in reversed(self.jobs.values())
            if (state is None or job.state == state)
            and (adapter is None or job.adapter == adapter)
            and (kind is None or job.kind == kind)
            and (key_id is None or job.key_id == key_id)
            and (where is None or where(job))
        ]
        first = 0 if after is None else 1 + [job.id for job in found].index(after)
        return found[first : first + limit]

    async def unfinished(self) -> list[Job]:
        return [job for job in self.jobs.values() if not job.state.terminal]

    async def cancel(self, job_id: str, reason: str = "") -> Job:
        job = (await self.get(job_id)).model_copy(update={"state": JobState.CANCELLED, "reason": reason or None})
        self.jobs[job_id] = job
        return job

    async def pause(self, job_id: str) -> Job:
        self.jobs[job_id] = (await self.get(job_id)).model_copy(update={"paused": True})
        return self.jobs[job_id]

    async def resume(self, job_id: str) -> Job:
        self.jobs[job_id] = (await self.get(job_id)).model_copy(update={"paused": False})
        return self.jobs[job_id]

    async def newest_events(self, job_id: str, limit: int, before: str | None = None) -> Events:
        newest = [entry for entry in reversed(self.entries[job_id]) if before is None or entry.id < before]
        return newest[:limit]

    async def events(self, job_id: str, last_event_id: str | None = None) -> AsyncIterator[JobEvent]:
        seen = 0
        while True:
            for entry in self.entries[job_id][seen:]:
                seen += 1
                if last_event_id is None or int(entry.id[:-2]) > int(last_event_id[:-2]):
                    yield entry
                if entry.data.get("state") == "succeeded":
                    return
            await asyncio.sleep(0.02)


class MemoryRecords:
    """RedisRecords' methods over a dictionary."""

    def __init__(self) -> None:
        self.kept: dict[str, list[str]] = {}
        self.down = False

    def _check(self) -> None:
        if self.down:
            raise Unavailable("Redis is away")

    async def claim(self, key: str, sha: str, token: str) -> tuple[str, str]:
        self._check()
        known = self.kept.setdefault(key, [sha, token, ""])
        if known[0] != sha:
            return "other", ""
        if known[2]:
            return "done", known[2]
        return ("new" if known[1] == token else "running"), ""

    async def renew(self, key: str, token: str) -> None:
        self._check()

    async def finish(self, key: str, token: str, answer: str) -> None:
        self._check()
        self.kept[key][2] = answer

    async def abandon(self, key: str, token: str) -> None:
        self._check()
        del self.kept[key]

    async def aclose(self) -> None:
        return None


class MemoryWebhooks:
    """WebhookStore's methods for a gateway that sends nothing; it keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[Change] = []

    async def tell(self, changes: Sequence[Change]) -> None:
        self.told += changes

    async def aclose(self) -> None:
        return None

    async def list(
        self, *, limit: int, after: str | None = None, state: str | None = None, pass_over: PassOver | None = None
    ) -> list[Delivery]:
        if after is not None:
            raise NotFound(f"no such delivery: {after!r}", param="after")
        return []

    async def get(self, delivery_id: str) -> Delivery:
        raise NotFound(f"no such delivery: {delivery_id!r}", param="delivery_id")

    resend = get
