"""Controller of canaries: looks at each that runs, decides, and moves the pointers of what is promoted.

Every gateway has one; that which holds the lease acts. A promotion is three steps, each of which may be the last of a
process that dies: the decision is kept with its evidence (promoting), the pointers are moved, the canary ends
(promoted). Who comes next goes on from there. A pointer remembers which canaries have moved it, so it moves once for
each, also when a former controller wakes up after somebody has rolled the adapter back by hand.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from services.common.adapters.names import AdapterVersion, parse_adapter_version
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import Conflict, ModelNotFound, TemperError, Unavailable
from services.common.shutdown import cancel_and_wait
from services.common.storage.lease import LeaseLost
from services.common.storage.repeated import repeat
from services.learning.canaries.answers import counts_of
from services.learning.canaries.beginning import current_version
from services.learning.canaries.enrolment import session_mark
from services.learning.canaries.evidence import Opinions, decided, evidence_of, gathered
from services.learning.canaries.record import CanaryRecord, Decision
from services.learning.canaries.store import LEASE_SECONDS, CanaryStore
from services.learning.feedback.record import FeedbackRecord
from services.learning.feedback.store import FeedbackFilter, FeedbackStore

LOOK_SECONDS = 0.5
_READING_SHARE = 0.05
"""Share of the time that reading feedback may take: where there is much, it is read less often."""

log = structlog.get_logger("canaries")


@dataclass(frozen=True, slots=True)
class Stores:
    """What a controller reads and moves."""

    canaries: CanaryStore
    feedback: FeedbackStore
    registry: AdapterRegistry
    """It blocks, so it is called in threads."""


class CanaryController:
    """Watches over all canaries while it holds the lease. For one asyncio loop.

    Args:
        stores: what it reads and moves.
        sync: has the engines read the pointers now.
        ended: told of each canary that has ended here.
        look_seconds: between two looks.
        lease_seconds: after which another controller takes over from one that has died.
    """

    def __init__(
        self,
        stores: Stores,
        sync: Callable[[], Awaitable[object]],
        ended: Callable[[CanaryRecord], None] = lambda _: None,
        *,
        look_seconds: float = LOOK_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self._stores = stores
        self._sync = sync
        self._ended = ended
        self._look_seconds = look_seconds
        self._lease = stores.canaries.lease(lease_seconds)
        self._renew_seconds = lease_seconds / 3
        self._opinions: dict[str, Opinions] = {}
        self._read_again = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._renew()),
            asyncio.create_task(repeat(self.look, self._look_seconds, log, "canaries")),
        ]

    async def stop(self) -> None:
        """Ends its work, and lets the next one begin at once."""
        for task in self._tasks:
            await cancel_and_wait(task, again_seconds=1.0)
        if self._tasks:
            try:
                await self._lease.release()
            except Unavailable as error:
                log.warning("canaries.lease_kept", error=error.message)

    async def look(self) -> bool:
        """Looks at every canary once; False: somebody else does."""
        fence = await self._lease.hold()
        if fence is None:
            return False
        records = await self._stores.canaries.running()
        opinions = await self._read(records)
        for record in records:
            try:
                if record.state == "promoting":
                    await self._promote(record, fence)
                elif record.id in opinions:
                    await self._look_at(record, opinions[record.id], fence)
            except LeaseLost:
                return False
            except Conflict as error:  # a person was quicker
                log.info("canary.decided_otherwise", canary=record.id, error=error.message)
            except Exception as error:  # the others are looked at all the same
                log.warning("canary.not_looked_at", canary=record.id, error=str(error), exc_info=True)
        return True

    async def _renew(self) -> None:
        """Holds the lease through looks that take long."""
        await repeat(self._lease.hold, self._renew_seconds, log, "canaries.lease")

    # One canary.

    async def _look_at(self, record: CanaryRecord, opinions: Opinions, fence: int) -> None:
        store = self._stores.canaries
        counts = counts_of((await store.counts(record.id)).values())
        evidence = evidence_of(record, counts, opinions, await store.now())
        decision = decided(record, evidence)
        if decision is None or decision.outcome == "promote":
            try:
                decision = await asyncio.to_thread(self._superseded, record) or decision
            except Unavailable as error:  # of the object store: guardrails hold without it, promotions wait
                log.warning("canary.pointers_unknown", canary=record.id, error=error.message)
                decision = None
        if decision is None:
            await store.looked(record.id, evidence, fence=fence)
            return
        now = await store.decide(record, decision, evidence=evidence, fence=fence)
        log.info("canary.decided", canary=record.id, candidate=record.candidate, **decision.model_dump())
        if now.ended:
            self._ended(now)
        else:
            await self._promote(now, fence)

    def _superseded(self, record: CanaryRecord) -> Decision | None:
        """Decision for a canary whose comparison is none any more. Blocking."""
        registry = self._stores.registry
        try:
            registry.manifest(parse_adapter_version(record.candidate))
        except ModelNotFound as error:
            return Decision(outcome="supersede", reason="gone", detail=error.message)
        current = current_version(registry, record.adapter)
        if current != _current(record):
            detail = f"{current or 'no version'} is current now, it was {record.current}"
            return Decision(outcome="supersede", reason="moved", detail=detail)
        attached = registry.attached()
        if record.attached and attached != current:
            detail = f"{attached or 'nothing'} is attached now, it was {record.current}"
            return Decision(outcome="supersede", reason="moved", detail=detail)
        return None

    async def _promote(self, record: CanaryRecord, fence: int) -> None:
        """Moves the pointers of a canary that is decided, and ends it."""
        store, registry = self._stores.canaries, self._stores.registry
        candidate, current = parse_adapter_version(record.candidate), _current(record)
        kept = record.model_dump_json(exclude={"key", "owner"})
        instead = None
        try:
            await asyncio.to_thread(registry.keep_canary, candidate, record.id, kept)
            seen = await asyncio.to_thread(registry.attachment)
            await self._still(fence)
            before = 0 if current is None else current.version
            await asyncio.to_thread(registry.set_current, candidate, only_from=before, by=record.id)
            if record.attached and seen.version == current:
                await self._still(fence)
                await asyncio.to_thread(registry.attach_instead, seen, candidate)
        except LeaseLost:
            raise
        except (Conflict, ModelNotFound) as error:
            reason = "moved" if isinstance(error, Conflict) else "gone"
            instead = Decision.model_validate({"outcome": "supersede", "reason": reason, "detail": error.message})
        try:
            await self._sync()
        except TemperError as error:  # engines poll the pointers, too
            log.warning("canary.sync_failed", canary=record.id, error=error.message)
        self._ended(await store.finish(record, fence=fence, instead=instead))

    async def _still(self, fence: int) -> None:
        if await self._lease.hold() != fence:
            raise LeaseLost("another controller watches over canaries now")

    # Feedback.

    async def _read(self, records: Sequence[CanaryRecord]) -> Mapping[str, Opinions]:
        """Opinions of every canary, read anew as often as may be: what was edited or deleted counts as it is now."""
        if not records or (time.monotonic() < self._read_again and all(one.id in self._opinions for one in records)):
            return self._opinions
        began = time.monotonic()
        found: list[FeedbackRecord] = []
        oldest = min(record.began_at for record in records)
        async for opinion in self._stores.feedback.each(FeedbackFilter(None)):
            if opinion.created_at < oldest:
                break
            found.append(opinion)
        marks = list({session_mark(one.owner, one.said.session_id) for one in found if one.said.session_id is not None})
        sessions = {record.id: await self._stores.canaries.sessions(record.id, marks) for record in records}
        self._opinions = await asyncio.to_thread(gathered, records, found, sessions)
        now = time.monotonic()
        self._read_again = now + (now - began) * (1 / _READING_SHARE - 1)
        return self._opinions


def _current(record: CanaryRecord) -> AdapterVersion | None:
    """Version that the candidate is compared with; None: the model without adapter."""
    return None if record.of_base else parse_adapter_version(record.current)
