"""An in-memory stand-in for the queue of batches: both of its faces, for one process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any

from services.common.errors import Conflict, NotFound, Unavailable
from services.common.queue.delivery import Claimed, JobLost
from services.common.queue.depth import QueueDepth
from services.common.storage.ids import ulid
from services.common.storage.record_versions import PassOver
from services.gateway.core.batch_queue import NOW, Batch, BatchSpec, ClaimedBatch, Kind, LineError, request_sha

_RUNNING = "running"


class MemoryBatches:
    """BatchQueue's and BatchConsumer's methods over a dictionary."""

    kind: Kind = "batch"

    def __init__(self) -> None:
        self.records: dict[str, Batch] = {}
        self.keys: dict[tuple[str, str], str] = {}
        self.fences: dict[str, int] = {}
        self.stages: list[str] = []
        self.down = False
        self.clock_off = 0.0
        """Seconds by which the queue's clock is ahead of this machine's."""
        self._lock = threading.Lock()

    def _check(self) -> None:
        if self.down:
            raise Unavailable("Redis is away")

    def _change(self, batch_id: str, **fields: Any) -> Batch:
        self.records[batch_id] = self.records[batch_id].model_copy(update=fields)
        return self.records[batch_id]

    # As those who submit see it.

    async def depth(self) -> QueueDepth:
        self._check()
        return QueueDepth(0, 0, 0, 0.0)

    async def aclose(self) -> None:
        return None

    def of(self, kind: Kind) -> MemoryBatches:
        return _Of(self, kind)

    async def submitted(self, spec: BatchSpec, idempotency_key: str) -> Batch | None:
        self._check()
        known = self.keys.get((spec.owner, idempotency_key))
        if known is None or known not in self.records:
            return None
        if request_sha(self.records[known].spec) != request_sha(spec):
            raise Conflict("the idempotency key was used with another request", param="idempotency_key")
        return self.records[known]

    async def submit(self, spec: BatchSpec, *, idempotency_key: str | None = None) -> Batch:
        self._check()
        batch = Batch(
            id=f"{spec.kind}_{ulid()}",
            spec=spec,
            state="queued",
            stage="validating",
            cancelling=False,
            created_at=self.now(),
            in_progress_at=None,
            finalizing_at=None,
            finished_at=None,
            cancelling_at=None,
            total=0,
            completed=0,
            failed=0,
            errors=[],
            output_file_id=None,
            error_file_id=None,
        )
        self.records[batch.id] = batch
        if idempotency_key is not None:
            self.keys[spec.owner, idempotency_key] = batch.id
        return batch

    async def unfinished(self, owner: str, *, most: int) -> int:
        self._check()
        return min(most, sum(not batch.ended for batch in self.records.values() if batch.spec.owner == owner))

    async def owned(self, owner: str, batch_id: str) -> Batch:
        self._check()
        found = self.records.get(batch_id)
        if found is None or found.spec.owner != owner or found.spec.kind != self.kind:
            raise NotFound(f"no such batch: {batch_id!r}", param="id")
        return found

    async def list(
        self,
        owner: str,
        *,
        limit: int,
        after: str | None = None,
        before: str | None = None,
        pass_over: PassOver | None = None,
    ) -> list[Batch]:
        self._check()
        found = [batch for batch in reversed(self.records.values()) if batch.spec.owner == owner]
        found = [batch for batch in found if batch.spec.kind == self.kind]
        if before is not None:
            place = [batch.id for batch in found].index((await self.owned(owner, before)).id)
            return found[max(0, place - limit) : place]
        if after is not None:
            place = [batch.id for batch in found].index((await self.owned(owner, after)).id)
            found = found[place + 1 :]
        return found[:limit]

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        batch = await self.owned(owner, batch_id)
        if batch.ended and batch.status != "cancelled":
            raise Conflict(f"batch {batch_id} is {batch.status}: there is nothing to cancel", param="id")
        if batch.state == "queued" and batch_id not in self.fences:
            return self._change(batch_id, state="cancelled", finished_at=time.time())
        return self._change(batch_id, cancelling=True, cancelling_at=time.time())

    async def remove(self, owner: str, batch_id: str) -> None:
        if not (await self.owned(owner, batch_id)).ended:
            raise Conflict(f"batch {batch_id} has not ended: cancel it", param="id")
        del self.records[batch_id]

    async def over(self, batch_id: str) -> bool:
        return batch_id not in self.records or self.records[batch_id].ended

    # As those who run them see it.

    def close(self) -> None:
        return None

    def now(self) -> float:
        self._check()
        return time.time() + self.clock_off

    def claim(self, block_seconds: float) -> ClaimedBatch | None:
        self._check()
        with self._lock:
            for batch in list(self.records.values()):
                if batch.state == "queued":
                    self.fences[batch.id] = fence = self.fences.get(batch.id, 0) + 1
                    batch = self._change(batch.id, state=_RUNNING)
                    return Claimed(
                        job=batch, spec=batch.spec, fence=str(fence), attempt=1, failures=0, entry="1-0", spec_sha=""
                    )
        time.sleep(0.02)
        return None

    def _owned(self, claimed: ClaimedBatch) -> Batch:
        self._check()
        batch = self.records[claimed.id]
        if batch.state != _RUNNING or str(self.fences[claimed.id]) != claimed.fence:
            raise JobLost("another owner has it")
        return batch

    def heartbeat(self, claimed: ClaimedBatch) -> bool:
        return self._owned(claimed).cancelling

    def publishing(self, claimed: ClaimedBatch) -> bool:
        return not self._owned(claimed).cancelling

    def stage(
        self, claimed: ClaimedBatch, stage: str, fields: Mapping[str, str], *, progressed: bool = False
    ) -> dict[str, str]:
        batch = self._owned(claimed)
        self.stages.append(stage)
        for name, value in fields.items():
            known = getattr(batch, name)
            if value == NOW:
                found: Any = time.time() if known is None else known
            elif name == "errors":
                found = [LineError.model_validate(error) for error in json.loads(value)]
            else:
                found = int(value) if isinstance(known, int) else value
            batch = self._change(claimed.id, stage=stage, **{name: found})
        return {name: str(getattr(batch, name)) for name in fields}

    def _finish(self, claimed: ClaimedBatch, state: str) -> None:
        self._owned(claimed)
        self._change(claimed.id, state=state, finished_at=time.time())

    def complete(self, claimed: ClaimedBatch) -> None:
        self._finish(claimed, "succeeded")

    def fail(self, claimed: ClaimedBatch, reason: str) -> None:
        self._finish(claimed, "failed")

    def expire(self, claimed: ClaimedBatch) -> None:
        self._finish(claimed, "expired")

    def cancelled(self, claimed: ClaimedBatch) -> None:
        self._finish(claimed, "cancelled")

    def requeue(self, claimed: ClaimedBatch, reason: str = "") -> None:
        self._finish(claimed, "queued")

    def retry(self, claimed: ClaimedBatch, reason: str) -> None:
        self._finish(claimed, "failed" if claimed.attempt >= 3 else "queued")


class _Of(MemoryBatches):
    """The batches of one kind, in the dictionary of all."""

    def __init__(self, core: MemoryBatches, kind: Kind) -> None:
        self.kind = kind
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)
