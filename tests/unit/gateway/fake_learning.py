"""In-memory stand-ins for the stores of feedback and canaries, and the index of logged requests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence

from services.common.errors import Conflict
from services.common.storage.ids import ulid
from services.common.storage.lease import LeaseLost
from services.common.storage.record_versions import PassOver
from services.learning.canaries.record import CanaryRecord
from services.learning.canaries.store import CanaryFilter, Records, Route
from services.learning.canaries.store import missing as missing_canary
from services.learning.feedback.record import Feedback, FeedbackRecord
from services.learning.feedback.store import FeedbackFilter, missing
from services.learning.learners.policy import LearnerPolicy
from services.learning.learners.record import Cycle, Event, Learner, NewEvent
from services.learning.learners.store import LearnerStore, NewLearner
from services.learning.learners.store import missing as no_learner
from services.learning.request_log.index import Entry
from services.learning.request_log.parts import Line


class MemoryFeedback:
    """FeedbackStore's methods over a dictionary."""

    def __init__(self) -> None:
        self.records: dict[str, FeedbackRecord] = {}

    async def aclose(self) -> None:
        return None

    async def add(self, owner: str, said: Feedback) -> tuple[FeedbackRecord, str]:
        for record in self.records.values():
            if not record.used_by and self._voice(record.owner, record.said) == self._voice(owner, said):
                return await self.replace(record, said), "changed"
        now = time.time()
        made = FeedbackRecord(id=f"fb_{ulid()}", owner=owner, said=said, created_at=now, changed_at=now)
        self.records[made.id] = made
        return made, "created"

    async def replace(self, record: FeedbackRecord, said: Feedback) -> FeedbackRecord:
        if self._voice(record.owner, record.said) != self._voice(record.owner, said):
            raise Conflict("another voice", param="id")
        self.records[record.id] = record.model_copy(update={"said": said, "changed_at": time.time()})
        return self.records[record.id]

    async def get(self, feedback_id: str) -> FeedbackRecord:
        if feedback_id not in self.records:
            raise missing(feedback_id)
        return self.records[feedback_id]

    async def list(
        self, wanted: FeedbackFilter, *, limit: int, after: str | None = None, pass_over: PassOver | None = None
    ) -> list[FeedbackRecord]:
        return [record async for record in self.each(wanted, after=after)][:limit]

    async def each(self, wanted: FeedbackFilter, *, after: str | None = None) -> AsyncIterator[FeedbackRecord]:
        for name in sorted(self.records, reverse=True):
            if (after is None or name < after) and wanted.takes(self.records[name]):
                yield self.records[name]

    async def count(self, wanted: FeedbackFilter, since: float, until: float) -> int:
        return sum(
            since <= record.created_at < until
            for record in self.records.values()
            if wanted.owner in (None, record.owner)
        )

    async def mark_used(self, ids: Sequence[str], data_set: str) -> None:
        for one in ids:
            self.records[one] = self.records[one].model_copy(update={"used_by": (data_set,)})

    async def delete(self, ids: Sequence[str]) -> int:
        return sum(self.records.pop(one, None) is not None for one in ids)

    async def delete_all(self, wanted: FeedbackFilter) -> int:
        return await self.delete([record.id async for record in self.each(wanted)])

    @staticmethod
    def _voice(owner: str, said: Feedback) -> tuple[str, str, str, str | None]:
        return owner, said.target, said.source, said.user


class MemoryCanaries:
    """CanaryStore's methods that read, where no canary ever runs."""

    async def aclose(self) -> None:
        return None

    def lease(self, seconds: float) -> MemoryCanaries:
        del seconds
        return self

    async def hold(self) -> int:
        return 1

    async def release(self) -> None:
        return None

    async def routes(self) -> Mapping[Route, float]:
        return {}

    async def running(self) -> Records:
        return []

    async def list(
        self, wanted: CanaryFilter, *, limit: int, after: str | None = None, pass_over: PassOver | None = None
    ) -> Records:
        del wanted, limit, after
        return []

    async def get(self, canary_id: str) -> CanaryRecord:
        raise missing_canary(canary_id)


class MemoryIndex:
    """RequestIndex's methods over dictionaries."""

    def __init__(self) -> None:
        self.entries: dict[str, tuple[Entry, Line]] = {}
        self.marks: dict[str, float] = {}

    def close(self) -> None:
        return None

    def add(self, part: str, entries: Sequence[tuple[Entry, Line]], now: float) -> None:
        del part, now
        self.entries |= {entry.id: (entry, line) for entry, line in entries}

    def is_whole(self) -> bool:
        return True

    def find(self, ids: Sequence[str]) -> Mapping[str, Line]:
        by_id = {one: line for entry, line in self.entries.values() for one in (entry.id, *entry.also)}
        return {one: by_id[one.partition(":")[0]] for one in ids if one.partition(":")[0] in by_id}

    def newest(self, name: str, *, limit: int, after: str | None = None) -> Sequence[str]:
        found = sorted(self.entries.values(), key=lambda one: one[0].at, reverse=True)
        ids = [entry.id for entry, _ in found if name in entry.lists]
        start = 0 if after is None else ids.index(after) + 1 if after in ids else len(ids)
        return ids[start : start + limit]

    def count(self, name: str, since: float, until: float) -> int:
        return sum(name in entry.lists and since <= entry.at < until for entry, _ in self.entries.values())

    def remove(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.entries.pop(entry.id, None)

    def mark_erased(self, marks: Sequence[str], now: float) -> None:
        self.marks |= dict.fromkeys(marks, now)

    def erased(self) -> Mapping[str, float]:
        return self.marks

    def waiting(self, now: float) -> Sequence[str]:
        del now
        return []


class MemoryLease:
    """Lease's methods for the only one that wishes for it."""

    def __init__(self, store: MemoryLearners) -> None:
        self._store = store
        self._fence: int | None = None

    async def hold(self) -> int | None:
        if self._fence is None or self._fence != self._store.fence:
            self._store.fence += 1
            self._fence = self._store.fence
        return self._fence

    async def release(self) -> None:
        return None


class MemoryLearners(LearnerStore):
    """LearnerStore's methods over a dictionary."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[Learner, list[Event]]] = {}
        self.fence = 0

    async def aclose(self) -> None:
        return None

    def lease(self, seconds: float = 1.0) -> MemoryLease:  # type: ignore[override]
        del seconds
        return MemoryLease(self)

    async def get(self, name: str) -> Learner:
        if name not in self.kept:
            raise no_learner(name)
        return self.kept[name][0]

    async def all(self, pass_over: PassOver | None = None) -> list[Learner]:
        return [self.kept[name][0] for name in sorted(self.kept)]

    async def events(self, learner: Learner, *, limit: int, after: str | None = None) -> list[Event]:
        found = self.kept[learner.name][1]
        return [one for one in reversed(found) if after is None or int(one.id[:-2]) < int(after[:-2])][:limit]

    async def create(self, new: NewLearner, cycle: Cycle, *events: NewEvent) -> Learner:
        name, now = new.policy.name, time.time()
        if name in self.kept:
            raise Conflict(f"learner {name!r} exists", param="name")
        learner = Learner(
            id=f"learner_{ulid()}",
            policy=new.policy,
            revision=1,
            turn=1,
            cycle=cycle,
            key_id=new.key_id,
            everybodys=new.everybodys,
            created_at=now,
            changed_at=now,
        )
        self.kept[name] = learner, []
        self._tell(name, events)
        return learner

    async def write(
        self,
        learner: Learner,
        cycle: Cycle,
        events: Sequence[NewEvent] = (),
        *,
        policy: LearnerPolicy | None = None,
        fence: int | None = None,
    ) -> Learner:
        found = await self.get(learner.name)
        if found.id != learner.id:
            raise no_learner(learner.name)
        if fence is not None and fence != self.fence:
            raise LeaseLost("another controller acts for learners now")
        if found.turn != learner.turn:
            raise Conflict("changed meanwhile", param="name")
        changed = {"cycle": cycle, "turn": found.turn + 1}
        if policy is not None:
            changed |= {"policy": policy, "revision": found.revision + 1, "changed_at": time.time()}
        self.kept[learner.name] = found.model_copy(update=changed), self.kept[learner.name][1]
        self._tell(learner.name, events)
        return self.kept[learner.name][0]

    async def delete(self, learner: Learner) -> bool:
        return self.kept.pop(learner.name, None) is not None

    def _tell(self, name: str, events: Sequence[NewEvent]) -> None:
        kept = self.kept[name][1]
        for event in events:
            kept.append(Event(id=f"{len(kept) + 1}-0", at=time.time(), **event.model_dump()))
