"""Batches of requests as data and as jobs of a queue of their own; gateways are its consumers.

The keys are those of services/common/queue/keyspace.py under names of their own, with an index an owner.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, Final, Literal, Self, TypeAlias, cast

from pydantic import Field, TypeAdapter

from services.common.errors import Conflict
from services.common.jobs.record import JobState
from services.common.queue import scripts, steering_scripts
from services.common.queue.delivery import Claimed, Delivery
from services.common.queue.keyspace import Keyspace
from services.common.queue.reader import QueueReader
from services.common.settings import CommonSettings
from services.common.storage.ids import PATTERN, key_of, ulid
from services.common.storage.record_versions import BATCH, PassOver
from services.common.storage.redis import call_async
from services.common.validation.strict_models import StrictModel

BATCHES = Keyspace(
    "temper:batches",
    "gateways",
    "temper:batch:",
    "temper:batch-line:",
    "temper:batch-idempotency:",
    BATCH,
    settled_by_owner=True,
)
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
MESSAGES: Final = "/v1/messages"
"""The endpoint of Anthropic's message batches, which are made, named and listed apart from OpenAI's."""
Kind = Literal["batch", "msgbatch"]
"""Kind of a batch: what its id begins with."""
Stage = Literal["validating", "in_progress", "finalizing"]
Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
EXPIRED = "expired"
"""State of a batch whose window is over; a training job has no such state."""
NOW = "@first"
"""Value of a stage's field that stands for the present time, unless an earlier attempt wrote one."""
_ENDS: Mapping[str, Status] = {
    JobState.SUCCEEDED: "completed",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
    EXPIRED: "expired",
}
_FIRST_SCHEMA = 1
"""Schema of OpenAI's batches, which have not changed since the first release: it may go on with them."""
_FIELDS = (
    "id",
    "state",
    "stage",
    "metadata",
    "cancel",
    "cancel_at",
    "created_at",
    "in_progress_at",
    "finalizing_at",
    "finished_at",
    "total",
    "completed",
    "failed",
    "canceled",
    "expired",
    "errors",
    "output_file_id",
    "error_file_id",
    "reason",
    "schema",
)


class BatchSpec(StrictModel):
    """Specification of a batch, as it was asked for."""

    owner: str
    input_file_id: str
    endpoint: Endpoint | Literal["/v1/messages"]
    window_seconds: int = Field(86_400, ge=1)
    """Time after which requests of the batch that have not run are not run any more."""
    metadata: dict[str, str] | None = None
    output_seconds: int | None = Field(None, ge=1)
    """Time after which the files that the batch writes expire; None: never."""
    requests: int | None = Field(None, ge=1, exclude_if=lambda value: value is None)
    """Number of requests, where the gateway wrote the input file from the request itself."""
    digest: str | None = Field(None, exclude_if=lambda value: value is None)
    """SHA-256 of that file: what an idempotency key stands for, in the place of the file's id."""

    @property
    def kind(self) -> Kind:
        return "msgbatch" if self.endpoint == MESSAGES else "batch"

    @property
    def file_owner(self) -> str:
        """Owner of the batch's files in the object store; files of a message batch are not shown by /v1/files."""
        # No id of a key has a slash.
        return f"{self.owner}/messages" if self.kind == "msgbatch" else self.owner


class LineError(StrictModel):
    """Error for which an input file was refused."""

    code: str
    message: str
    line: int | None = None
    """Line of the file, from 1; None: the file as a whole."""
    param: str | None = None


class Batch(StrictModel):
    """A batch as the queue knows it. Times are unix seconds."""

    id: str
    spec: BatchSpec
    state: str
    stage: Stage
    cancelling: bool
    created_at: float
    in_progress_at: float | None
    finalizing_at: float | None
    finished_at: float | None
    cancelling_at: float | None
    total: int
    completed: int
    failed: int
    canceled: int = 0
    """Count of canceled requests of a message batch, like ``expired``; those of another count as failed."""
    expired: int = 0
    errors: list[LineError]
    output_file_id: str | None
    error_file_id: str | None

    @property
    def expires_at(self) -> float:
        return self.created_at + self.spec.window_seconds

    @property
    def status(self) -> Status:
        if (end := _ENDS.get(self.state)) is not None:
            return end
        return "cancelling" if self.cancelling else self.stage

    @property
    def ended(self) -> bool:
        return self.state in _ENDS


_LOOKED_AT = 1_000
_OPEN = BATCHES.lua(f"""
-- KEYS indexes; ARGV most
local open, most = 0, tonumber(ARGV[1])
for _, index in ipairs(KEYS) do
  for _, id in ipairs(redis.call('ZREVRANGE', index, 0, {_LOOKED_AT - 1})) do
    local state = redis.call('HGET', JOBS .. id, 'state')
    if state == 'queued' or state == 'running' then open = open + 1 end
    if open >= most then return open end
  end
end
return open
""")
_FORGET = BATCHES.lua("""
-- KEYS job events index; ARGV id
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'queued' or state == 'running' then return 'OPEN' end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('ZREM', KEYS[3], ARGV[1])
return 'OK'
""")

ClaimedBatch: TypeAlias = Claimed[Batch, BatchSpec]

# Spelled out, because BatchQueue has a method `list`.
Batches: TypeAlias = list[Batch]


class BatchQueue(QueueReader[Batch]):
    """Submits and observes batches of one kind. For one asyncio loop; every method may raise Unavailable.

    An owner sees only its own: another's batch does not exist for it, and neither does one of another kind.
    """

    fields = _FIELDS
    called = "batch"

    def __init__(self, settings: CommonSettings) -> None:
        super().__init__(settings, replace(BATCHES, ttl=settings.jobs_ttl_seconds))
        self._submit = self._script(scripts.SUBMIT)
        self._cancel = self._script(steering_scripts.CANCEL)
        self._open = self._redis.register_script(_OPEN)
        self._remove = self._redis.register_script(_FORGET)
        self.kind: Kind = "batch"

    def of(self, kind: Kind) -> Self:
        """The batches of another kind, over the same connection."""
        other = copy(self)
        other.kind = kind
        return other

    def record(self, values: Any) -> Batch | None:
        return _batch(values)

    async def unfinished(self, owner: str, *, most: int) -> int:
        """Number of unfinished batches of an owner, of the latest thousand of each kind; counted up to ``most``."""
        indexes = [_index(owner, kind) for kind in ("batch", "msgbatch")]
        return int(await call_async(lambda: self._open(keys=indexes, args=[most])))

    async def submitted(self, spec: BatchSpec, idempotency_key: str) -> Batch | None:
        """The batch that this request made when it came before under the same key.

        Raises:
            Conflict: the key came with another request.
        """
        key = _idempotency(spec.owner, idempotency_key)
        known = await call_async(lambda: cast(Awaitable[str | None], self._redis.get(key)))
        if known is None:
            return None
        batch_id, sha = known.split(" ")
        found = await self._find(batch_id)
        if found is not None and sha != request_sha(spec):
            raise _key_used(idempotency_key, batch_id)
        return found

    async def submit(self, spec: BatchSpec, *, idempotency_key: str | None = None) -> Batch:
        """Queues a batch. The same key of an owner with the same request returns the same batch, for a week.

        Raises:
            Conflict: the key was used with another request.
        """
        batch_id = f"{spec.kind}_{ulid()}"
        keys = [
            BATCHES.stream,
            _index(spec.owner, spec.kind),
            BATCHES.job_key(batch_id),
            BATCHES.events_key(batch_id),
            _idempotency(spec.owner, idempotency_key or ""),
            BATCHES.line_key(batch_id),
        ]
        text = spec.model_dump_json()
        # The spec is gone when a batch has ended; what a record shows of it stays in `metadata`. A line of its own:
        # batches do not wait for each other.
        args = [batch_id, text, request_sha(spec), "batch", batch_id, text, "0" if idempotency_key is None else "1"]
        args += ["", "", str(_FIRST_SCHEMA if spec.kind == "batch" else BATCH.version)]
        outcome, existing = await call_async(lambda: self._submit(keys=keys, args=args))
        if outcome == "conflict":
            raise _key_used(idempotency_key or "", existing)
        await self._forget_expired(_index(spec.owner, spec.kind))
        return await self.get(existing)

    async def owned(self, owner: str, batch_id: str) -> Batch:
        """Raises NotFound: there is none, or it is somebody else's."""
        found = await self._find(batch_id) if re.fullmatch(f"{self.kind}_{PATTERN}", batch_id) else None
        if found is None or found.spec.owner != owner:
            raise self.missing(batch_id)
        return found

    async def list(
        self,
        owner: str,
        *,
        limit: int,
        after: str | None = None,
        before: str | None = None,
        pass_over: PassOver | None = None,
    ) -> Batches:
        """An owner's batches, newest first: from behind ``after`` on, or the last ones that stand before ``before``.

        Args:
            pass_over: told of batches of a later release. None: they are an error.

        Raises:
            NotFound: there is no such batch.
            NewerSchema: there is a batch of a later release.
        """

        def own(batch: Batch) -> bool:
            return batch.spec.owner == owner

        index = _index(owner, self.kind)
        if before is None:
            return await self._page(index, limit, after, own, pass_over=pass_over)
        return (await self._page(index, limit, before, own, oldest_first=True, pass_over=pass_over))[::-1]

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Cancels a batch that has not begun at once, and asks the owner of one that runs to stop.

        Raises:
            NotFound: there is none, or it is somebody else's.
            Conflict: it has ended otherwise, or is about to.
        """
        batch = await self.owned(owner, batch_id)
        if batch.ended and batch.status != "cancelled":
            raise Conflict(f"batch {batch_id} is {batch.status}: there is nothing to cancel", param="id")
        keys = [BATCHES.job_key(batch_id), BATCHES.events_key(batch_id), BATCHES.stream]
        answer = await call_async(lambda: self._cancel(keys=keys, args=[BATCHES.group, BATCHES.settles]))
        if answer == "LATE":
            raise Conflict(f"all requests of batch {batch_id} have run and its files are being written", param="id")
        return await self.owned(owner, batch_id)

    async def remove(self, owner: str, batch_id: str) -> None:
        """Forgets a batch that has ended; its idempotency key is free again.

        Raises:
            NotFound: there is none, or it is somebody else's.
            Conflict: it has not ended.
        """
        await self.owned(owner, batch_id)
        keys = [BATCHES.job_key(batch_id), BATCHES.events_key(batch_id), _index(owner, self.kind)]
        if await call_async(lambda: self._remove(keys=keys, args=[batch_id])) == "OPEN":
            raise Conflict(f"batch {batch_id} has not ended: cancel it, and delete it when it has ended", param="id")

    async def over(self, batch_id: str) -> bool:
        """Nobody will work at it any more."""
        found = await self._find(batch_id)
        return found is None or found.ended


class BatchConsumer(Delivery[Batch, BatchSpec]):
    """Takes batches and writes their progress. Thread-safe; every method may raise Unavailable."""

    fields = _FIELDS
    spec = TypeAdapter(BatchSpec)

    def __init__(
        self, settings: CommonSettings, *, owner: str, reclaim_seconds: float = 30.0, max_attempts: int = 3
    ) -> None:
        keyspace = replace(BATCHES, ttl=settings.jobs_ttl_seconds)
        super().__init__(settings, keyspace, owner=owner, reclaim_seconds=reclaim_seconds, max_attempts=max_attempts)

    def record(self, values: Any) -> Batch | None:
        return _batch(values)

    def stage(
        self, claimed: ClaimedBatch, stage: Stage, fields: Mapping[str, str], *, progressed: bool = False
    ) -> dict[str, str]:
        """Writes how far a batch is; returns what the fields are now.

        Args:
            fields: of the hash; NOW as a value keeps what an earlier attempt wrote.
            progressed: results were stored: should the owner die now, that is no failed attempt.

        Raises:
            JobLost: somebody else owns it.
        """
        args = [claimed.fence, stage, "1" if progressed else "0"]
        for name, value in fields.items():
            args += [name, value]
        answer = self._owned(scripts.STAGE, claimed, [BATCHES.events_key(claimed.id)], args)
        return dict(zip(fields, answer[1:], strict=True))

    def complete(self, claimed: ClaimedBatch) -> None:
        """Raises JobLost."""
        self._finish(claimed, JobState.SUCCEEDED, "")

    def expire(self, claimed: ClaimedBatch) -> None:
        """Raises JobLost."""
        self._finish(claimed, EXPIRED, "the completion window has passed")


def _batch(values: Any) -> Batch | None:
    field = dict(zip(_FIELDS, values, strict=True))
    if field["id"] is None or field["state"] is None:
        return None
    BATCH.check(field["schema"], f"batch {field['id']}")

    def number(name: str, kind: Callable[[str], Any]) -> Any:
        return kind(field[name]) if field[name] else None

    with BATCH.reading(f"batch {field['id']}"):
        errors = [LineError.model_validate(error) for error in json.loads(field["errors"] or "[]")]
        if field["state"] == JobState.FAILED and not errors:
            errors = [LineError(code="batch_failed", message=field["reason"] or "the batch failed")]
        return Batch(
            id=field["id"],
            spec=BatchSpec.model_validate_json(field["metadata"]),
            state=field["state"],
            stage=field["stage"] or "validating",
            cancelling=field["cancel"] == "1",
            created_at=float(field["created_at"] or 0),
            in_progress_at=number("in_progress_at", float),
            finalizing_at=number("finalizing_at", float),
            finished_at=number("finished_at", float),
            cancelling_at=number("cancel_at", float),
            total=number("total", int) or 0,
            completed=number("completed", int) or 0,
            failed=number("failed", int) or 0,
            canceled=number("canceled", int) or 0,
            expired=number("expired", int) or 0,
            errors=errors,
            output_file_id=field["output_file_id"] or None,
            error_file_id=field["error_file_id"] or None,
        )


def _index(owner: str, kind: str) -> str:
    return f"{BATCHES.index}:{key_of(owner)}" if kind == "batch" else f"{BATCHES.index}:{kind}:{key_of(owner)}"


def _idempotency(owner: str, key: str) -> str:
    return BATCHES.idempotency_key(f"{key_of(owner)}:{hashlib.sha256(key.encode()).hexdigest()}")


def request_sha(spec: BatchSpec) -> str:
    """Digest of the request that a spec was made of: what an idempotency key stands for."""
    said = spec.model_dump(mode="json", exclude=None if spec.digest is None else {"input_file_id"})
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _key_used(key: str, batch_id: str) -> Conflict:
    return Conflict(
        f"idempotency key {key!r} was used for batch {batch_id} with another request; use a new key",
        param="idempotency_key",
    )
