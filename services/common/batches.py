"""Batches of requests as data and as jobs of a queue of their own; gateways are its consumers.

The keys are those of services/common/scripts.py under names of their own, with an index an owner.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeAlias, cast

from pydantic import Field, TypeAdapter

from services.common import scripts
from services.common.delivery import Claimed, Delivery
from services.common.errors import Conflict
from services.common.ids import PATTERN, key_of, ulid
from services.common.jobs.record import JobState
from services.common.jobs.strict import StrictModel
from services.common.ledger import Ledger
from services.common.redis_client import call_async
from services.common.schema_versions import BATCH
from services.common.settings import CommonSettings

BATCHES = scripts.Space(
    "temper:batches",
    "gateways",
    "temper:batch:",
    "temper:batch-line:",
    "temper:batch-idempotency:",
    BATCH,
    settled_by_owner=True,
)
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Stage = Literal["validating", "in_progress", "finalizing"]
Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
EXPIRED = "expired"
"""The one state that a training job does not have."""
NOW = "@first"
"""As the value of a stage's field: the present time, unless an earlier attempt wrote one."""
_ENDS: Mapping[str, Status] = {
    JobState.SUCCEEDED: "completed",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
    EXPIRED: "expired",
}
_ID = re.compile(rf"batch_{PATTERN}")
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
    "errors",
    "output_file_id",
    "error_file_id",
    "reason",
    "schema",
)


class BatchSpec(StrictModel):
    """What was asked for."""

    owner: str
    input_file_id: str
    endpoint: Endpoint
    window_seconds: int = Field(86_400, ge=1)
    """After which what has not run does not run any more."""
    metadata: dict[str, str] | None = None
    output_seconds: int | None = Field(None, ge=1)
    """After which the files that it writes expire; None: never."""


class LineError(StrictModel):
    """Why an input file was refused."""

    code: str
    message: str
    line: int | None = None
    """From 1; None: the file as a whole."""
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
-- KEYS index; ARGV most
local open, most = 0, tonumber(ARGV[1])
for _, id in ipairs(redis.call('ZREVRANGE', KEYS[1], 0, {_LOOKED_AT - 1})) do
  local state = redis.call('HGET', JOBS .. id, 'state')
  if state == 'queued' or state == 'running' then open = open + 1 end
  if open >= most then break end
end
return open
""")

ClaimedBatch: TypeAlias = Claimed[Batch, BatchSpec]

# Spelled out, because BatchQueue has a method `list`.
Batches: TypeAlias = list[Batch]


class BatchQueue(Ledger[Batch]):
    """Submits and observes batches. For one asyncio loop; every method may raise Unavailable.

    An owner sees only its own: another's batch does not exist for it.
    """

    fields = _FIELDS
    called = "batch"

    def __init__(self, settings: CommonSettings) -> None:
        super().__init__(settings, BATCHES)
        self._submit = self._script(scripts.SUBMIT)
        self._cancel = self._script(scripts.CANCEL)
        self._open = self._redis.register_script(_OPEN)

    def record(self, values: Any) -> Batch | None:
        return _batch(values)

    async def unfinished(self, owner: str, *, most: int) -> int:
        """How many of an owner's latest thousand batches have not ended; counted up to ``most``."""
        return int(await call_async(lambda: self._open(keys=[_index(owner)], args=[most])))

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
        if sha != _sha(spec):
            raise _key_used(idempotency_key, batch_id)
        return await self._find(batch_id)

    async def submit(self, spec: BatchSpec, *, idempotency_key: str | None = None) -> Batch:
        """Queues a batch. The same key of an owner with the same request returns the same batch, for a week.

        Raises:
            Conflict: the key was used with another request.
        """
        batch_id = "batch_" + ulid()
        keys = [
            BATCHES.stream,
            _index(spec.owner),
            BATCHES.job_key(batch_id),
            BATCHES.events_key(batch_id),
            _idempotency(spec.owner, idempotency_key or ""),
            BATCHES.line_key(batch_id),
        ]
        text = spec.model_dump_json()
        # The spec is gone when a batch has ended; what a record shows of it stays in `metadata`. A line of its own:
        # batches do not wait for each other.
        args = [batch_id, text, _sha(spec), "batch", batch_id, text, "0" if idempotency_key is None else "1", ""]
        outcome, existing = await call_async(lambda: self._submit(keys=keys, args=args))
        if outcome == "conflict":
            raise _key_used(idempotency_key or "", existing)
        return await self.get(existing)

    async def owned(self, owner: str, batch_id: str) -> Batch:
        """Raises NotFound: there is none, or it is somebody else's."""
        found = await self._find(batch_id) if _ID.fullmatch(batch_id) else None
        if found is None or found.spec.owner != owner:
            raise self.missing(batch_id)
        return found

    async def list(self, owner: str, *, limit: int, after: str | None = None) -> Batches:
        """An owner's batches, newest first, from behind ``after`` on. Raises NotFound: there is no ``after``."""
        return await self._page(_index(owner), limit, after, lambda batch: batch.spec.owner == owner)

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
        super().__init__(settings, BATCHES, owner=owner, reclaim_seconds=reclaim_seconds, max_attempts=max_attempts)

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
        errors=errors,
        output_file_id=field["output_file_id"] or None,
        error_file_id=field["error_file_id"] or None,
    )


def _index(owner: str) -> str:
    return f"{BATCHES.index}:{key_of(owner)}"


def _idempotency(owner: str, key: str) -> str:
    return BATCHES.idempotency_key(f"{key_of(owner)}:{hashlib.sha256(key.encode()).hexdigest()}")


def _sha(spec: BatchSpec) -> str:
    return hashlib.sha256(json.dumps(spec.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _key_used(key: str, batch_id: str) -> Conflict:
    return Conflict(
        f"idempotency key {key!r} was used for batch {batch_id} with another request; use a new key",
        param="idempotency_key",
    )
